"""The report as one HTML file, which needs nothing besides itself."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from halfstep.core import LATER, LOW_FORMATS, Report
from halfstep.errors import MissingExtraError
from halfstep.report._heat import heat_maps, opened, windows
from halfstep.report._magnitudes import (
    broken_text,
    is_broken,
    is_known,
    largest_text,
    lost_text,
    zero_text,
)
from halfstep.report._numbers import bytes_text, number
from halfstep.report._timeline import timeline
from halfstep.report._visible import visible
from halfstep.report._words import (
    UNNAMED,
    date_text,
    end_text,
    fault_line,
    figures,
    headline,
    is_repeated,
    outcome,
    telling,
)

_NEEDED = ("jinja2", "plotly")
_MOST_SKIPS = 500
_FOLDER = files("halfstep.report") / "page"


def check_page() -> None:
    """Refuses to make a page where what it is made with is not installed.

    Raises:
        MissingExtraError: With the line that installs it.

    Example:
        >>> check_page()
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"The HTML page needs jinja2 and plotly, got an environment without "
            f"{' and '.join(missing)}. Install them: python -m pip install 'halfstep[report]'."
        )


def page(report: Report) -> str:
    """Returns a report as an HTML page.

    Its styles, its script and plotly's are part of it: it opens from disk, and asks no other
    computer for anything. Names from a model or a script are shown as text.

    Args:
        report: What happened.

    Raises:
        MissingExtraError: If the extra `report` is not installed.

    Example:
        >>> text = page(Report(script="<b>.py", policy="mixed_float16"))
        >>> text[:15], "<b>.py" in text, "&lt;b&gt;.py" in text
        ('<!doctype html>', False, True)
    """
    check_page()
    scripts = [_plotly(), _script()]
    text = _template().render(
        report=report,
        style=_read("page.css"),
        scripts=scripts,
        hashes=list(map(_hash, scripts)),
        data=embedded(_data(report)),
    )
    # A name may hold half of a pair, which no file can.
    return str(text).encode("utf-8", "replace").decode()


def _data(report: Report) -> dict[str, Any]:
    maps = heat_maps(report)
    return {
        "timeline": timeline(report),
        "heat": maps,
        "opened": opened(report, maps),
        "windows": windows(),
        "unnamed": UNNAMED,
    }


def embedded(data: Any) -> str:
    r"""Returns JSON that can stand inside of a script element, whatever its texts hold.

    Args:
        data: JSON types.

    Example:
        >>> print(embedded("</script>\u2028&"))
        "\u003c/script\u003e\u2028\u0026"
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "visible": visible,
        "breakable": _breakable,
        "paragraphs": lambda text: visible(text, lines=True),
        "number": number,
        "bytes": bytes_text,
        "largest": largest_text,
        "zero": zero_text,
        "known": is_known,
        "line": fault_line,
        "end": end_text,
        "date": date_text,
    }
    environment.globals |= {
        "figures": figures,
        "headline": headline,
        "is_repeated": is_repeated,
        "later": LATER,
        "most": _MOST_SKIPS,
        "outcome": outcome,
        "telling": telling,
        "lost": lost_text,
        "broken": broken_text,
        "formats": LOW_FORMATS,
        "by_bytes": _by_bytes,
        "is_broken": is_broken,
        "unnamed": UNNAMED,
    }
    return environment.from_string(_read("page.html"))


def _breakable(path: str) -> Any:
    """Returns a path as text that may go on in the next line after each of its parts."""
    from markupsafe import Markup, escape

    parts = re.findall(r"[^._]*[._]|[^._]+", visible(path))
    return Markup("<wbr>").join(map(escape, parts))


def _by_bytes(casts: Sequence[Any]) -> list[Any]:
    return sorted(casts, key=lambda cast: -cast.bytes)


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    # The one way in which a script could end its element too early.
    return _one_kind_of_line_end(get_plotlyjs()).replace("</script", "<\\/script")


def _script() -> str:
    # Functions first: what is at the end of the last part calls them.
    parts = "\n".join(map(_read, ("timeline.js", "heat.js", "page.js")))
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _read(name: str) -> str:
    return _one_kind_of_line_end((_FOLDER / name).read_text(encoding="utf-8"))


def _one_kind_of_line_end(text: str) -> str:
    # A browser reads all as one kind, before it computes the hash.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
