"""Errors that the machine makes, not the code: no space, no permission, a place that cannot hold a folder. One line each."""

import errno
import os
import re
from pathlib import Path

_SPACE = "free some space there, or use another place"
_RIGHTS = "this user may not do that there; change its owner or mode, or use another place"
_MEANINGS = {
    errno.ENOSPC: f"the disk is full; {_SPACE}",
    errno.EDQUOT: f"your quota of disk space is used up; {_SPACE}",
    errno.EROFS: "the file system is mounted read-only; use another place",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ENOTDIR: "a part of the path is a file where a folder should be; move it, or use another path",
    errno.ENAMETOOLONG: "the path is too long for its file system; use a shorter one",
}


def explained(error: BaseException) -> str | None:
    """What such an error means, with its path, in one line; None for any other error, which is a bug and keeps its trace.

    safetensors puts the system's error number in its text only; a home that cannot be made is told from a file that is
    missing by NG_HOME not being there.
    """
    if type(error).__name__ == "SafetensorError":
        number = re.search(r"os error (\d+)", str(error))
        meaning = _MEANINGS.get(int(number[1])) if number else None
        return f"{error}: {meaning}" if meaning else None
    if not isinstance(error, OSError):
        return None
    path = "" if error.filename is None else os.fsdecode(error.filename)
    if error.errno == errno.ENOENT:
        home = _missing_home()
        if home is None or not path or Path(path).absolute() not in (home, *home.parents):
            return None
        return f"{path}: cannot be made: {error.strerror}; set NG_HOME to a folder on a disk of this machine"
    meaning = _MEANINGS.get(error.errno or 0)
    if meaning is None:
        return None
    return f"{f'{path}: ' if path else ''}{error.strerror}: {meaning}"


def _missing_home() -> Path | None:
    from narrowgauge.serving.settings import SettingsError, read_settings

    try:
        home = read_settings().home
        return None if home.exists() else home
    except (SettingsError, OSError):
        return None
