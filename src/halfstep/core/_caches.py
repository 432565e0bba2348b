"""Where halfstep keeps what only saves time."""

import os
import stat
from pathlib import Path


def cache_folder() -> Path:
    """Returns the folder of this user for caches, which nobody else can write to.

    Raises:
        OSError: There can be none.

    Example:
        >>> cache_folder().name
        'halfstep'
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache"
    folder = caches / "halfstep"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or writable:
        raise PermissionError(f"{folder} needs to be a folder that only its user can write to")
    return folder
