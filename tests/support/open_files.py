"""The open files of this process."""

import os
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """Return the names of the open files below a folder.

    Other threads, and what other tests have left, open and close other files at any time.
    """
    opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return [path for path in opened if path.startswith(f"{folder.resolve()}/")]
