"""Import what the arguments of a command name: a feed, a function, a state."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import Any

from twinfeed.loaders.batches.feed import Feed, require_feed
from twinfeed.loaders.loop.run import Run
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file

_imported: set[str] = set()
"""The modules that the last file of `load_name` has imported, and its own name."""


def load_feed(text: str) -> Feed:
    """Import a Python file, and return its feed: "train.py:feed" is `feed` of train.py."""
    return require_feed(load_name(text, "--feed"))


def load_name(text: str, argument: str) -> Any:
    """Import a Python file, and return what has a name in it: "train.py:feed", `feed` of train.py.

    The modules beside it stay until the next file is imported, so that its functions can be
    pickled.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"{argument} must be FILE.py:NAME, such as train.py:feed, got {text!r}")
    file = Path(path).resolve(strict=True)
    sys.path.insert(0, str(file.parent))
    while _imported:
        sys.modules.pop(_imported.pop(), None)
    arguments, modules = sys.argv, {*sys.modules}
    sys.argv, Run.refused = [path], 0
    problem = ""
    try:
        with redirect_stdout(sys.stderr):  # what a command prints is its answer alone
            names = run_path(str(file), run_name=file.stem)
    except SystemExit as error:
        problem = f"exits (status {error.code})"
    except BaseException:
        if not Run.refused:
            raise
    finally:
        if Run.refused:  # whether or not the file, or a thread of it, has caught the SystemExit
            problem = "starts a loader"
        sys.argv, Run.refused = arguments, None
        imported = sys.modules.keys() - modules
        _imported.update(name for name in imported if _is_beside(name, file.parent))
    if problem:
        raise ValueError(
            f"{path} {problem} while it is imported: put what trains, runs and parses arguments "
            "below if __name__ == '__main__'"
        )
    if name not in names:
        raise ValueError(f"{path} has no {name!r}: give {argument} a name of its top level")
    if file.stem not in sys.modules:
        sys.modules[file.stem] = module = ModuleType(file.stem)
        vars(module).update(names)
        _imported.add(file.stem)
    return names[name]


def _is_beside(module: str, folder: Path) -> bool:
    """Return whether a module, or the package that it is in, lies in a folder."""
    # Not by `getattr`, which would import what is lazy.
    file = Path(getattr(sys.modules[module], "__dict__", {}).get("__file__") or "/")
    top = module.partition(".")[0]
    return file.is_relative_to(folder) and file.relative_to(folder).parts[0] in (top, f"{top}.py")


def load_state(path: str) -> Any:
    """Return the state in a JSON file, whatever it holds."""
    try:
        return json.loads(read_file(path, LIMITS.manifest_bytes))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no JSON ({error}): write a state by json.dump(loader.state_dict(), file)"
        ) from None
