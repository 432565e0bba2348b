"""Reports that were made up: a training with a fault, and one whose names are hostile."""

import math

from halfstep.core import Cast, Diagnosis, Exponents, Fault, Finding, Range, Ranges, Report, Step

BLOCKS = [f"blocks.{index}.{part}" for index in range(4) for part in ("attention", "mlp.expand")]
MODULES = ["embedding", *BLOCKS, "norm", "head"]
ROLES = {"output": 0, "weight": -4, "grad_output": -18, "grad_weight": -15}
SCALE = 65536.0
REMEDY = (
    'rules = Rules().with_rule("matmul", "full", where="blocks.3.*")\nprepare(model, optimizer)'
)
FAULT = Fault(
    "blocks.3.mlp.expand",
    "matmul",
    "forward",
    "output",
    "inf",
    "float16",
    (8, 2048),
    1200.0,
    remedy=REMEDY,
    source="train.py:41 (forward)",
)


def bell(middle, infs=0, width=5.0, total=40_000):
    """Returns counts of exponents around a middle."""
    places = range(round(middle - 3 * width), round(middle + 2 * width))
    shares = [math.exp(-(((place - middle) / width) ** 2)) for place in places]
    counts = {
        place: round(total * share / sum(shares))
        for place, share in zip(places, shares, strict=True)
    }
    return Exponents(counts, zeros=500, infs=infs, largest=1.5 * 2.0 ** max(counts))


def found(index, module, role):
    """Returns the range of one tensor."""
    is_backward = role.startswith("grad")
    middle = ROLES[role] - index * (0.8 if is_backward else -0.4)
    infs = 7 if (module, role) == (FAULT.module, "output") else 0
    return Range(module, role, bell(middle), bell(middle, infs), "float16", ("matmul",))


def step(number):
    """Returns a step of a training that falls, and stumbles at times."""
    skipped = number in (3, 60, 61)
    loss = math.inf if number == 61 else 2.5 * math.exp(-number / 40) + 0.1 * math.sin(number)
    return Step(
        number,
        loss,
        SCALE / 2 ** sum(number > each for each in (3, 60, 61)),
        skipped,
        "gradients held inf" if skipped else "",
        (("blocks.3.mlp.expand.weight", "inf"),) if skipped else (),
    )


REPORT = Report(
    script="train.py",
    policy="mixed_float16",
    versions=(("python", "3.11.7"), ("halfstep", "0.1.0"), ("torch", "2.13.0")),
    device="AMD EPYC (2 cores)",
    date="2026-11-30T14:00:00+00:00",
    steps=tuple(map(step, range(1, 121))),
    sampled=(1, 61, 101),
    diagnosis=Diagnosis(
        (FAULT, Fault("head", "softmax", *("forward", "output", "nan"), "float16", (8,), None)),
        SCALE,
    ),
    ranges=Ranges(
        tuple(found(index, name, role) for index, name in enumerate(MODULES) for role in ROLES)
    ),
    power=16,
    casts=tuple(
        Cast(f"aten::{name}", module, count, "float32", "float16", 4096 * (place + 1) * count)
        for place, module in enumerate(BLOCKS)
        for name, count in (("linear", 3), ("matmul", 1))
    ),
    findings=(
        Finding("error", "Its output does not fit into float16.", FAULT.module, REMEDY),
        Finding(
            "warning",
            "31 % of its gradients become 0 in float16.",
            "embedding",
            "scale=dynamic(init_scale=2**20)",
        ),
        Finding("note", "3 of 120 steps were skipped."),
    ),
)

HOSTILE = (
    "<b>bold</b>",
    "<script>window.hacked = true</script>",
    '"><img src=x onerror="window.hacked = true">',
    "</script><script>window.hacked = true</script>",
    "{{ 7 * 7 }}${7 * 7}",
    "<!--",
    '<a href="javascript:window.hacked=true">link</a>',
    "line\u2028separator\u2029'\\\"",
    "\u202ereversed\x1b[31m\x00",
    "&lt;entity&gt;&amp;",
    "half\ud800",
    "",
    "long." * 60,
)


FEW = Exponents({-3: 5, 1: 2}, largest=2.5)


def hostile():
    """Returns a report in which every text is hostile."""
    worst = HOSTILE[3]
    return Report(
        script=HOSTILE[1],
        policy=HOSTILE[0],
        versions=tuple((each, each) for each in HOSTILE),
        device=HOSTILE[2],
        date=worst,
        steps=tuple(
            Step(number, 1.0, 8.0, True, each, ((each, "inf"),))
            for number, each in enumerate(HOSTILE, 1)
        ),
        diagnosis=Diagnosis(
            tuple(
                Fault(each, each, each, each, each, "float16", (2,), 1.0, remedy=each, source=each)
                for each in HOSTILE
            )
        ),
        ranges=Ranges(
            tuple(
                Range(each, role, FEW, FEW, "float16")
                for each in HOSTILE
                for role in ("output", "grad_output", worst)
            )
        ),
        power=2,
        casts=tuple(Cast(each, each, 1, each, each, 9) for each in HOSTILE),
        findings=tuple(Finding("error", each, each, each) for each in HOSTILE),
        error=worst,
    )
