"""Paste the blocks of pages, in order, into a folder: `python pasting.py FOLDER PAGE...`.

What a block prints is compared with the `text` block after it. Each page gets an empty folder and
names of its own. A shell block without a `text` block prepares an environment, and is not run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import warnings
from math import isclose
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

BLOCK = re.compile(
    r"^```(python|sh)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL
)
NOT_RUN = re.compile(r"# Not run by the tests: needs ([\w, ]+)\.\n")
MEASURED = re.compile(r"[\d.,]+(?= (s|ms|/s|batches/s|MB|MiB)\b|  +[\d.]+ s\b)")
NUMBER = re.compile(r"\d+\.\d+|\d+e-\d+|\d+")


class Block(NamedTuple):
    """Code of a page, and what the page says that it prints."""

    language: str
    code: str
    printed: str

    def runs(self) -> bool:
        return bool(self.printed) if self.language == "sh" else not NOT_RUN.match(self.code)


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


def alike(shown: str, printed: str) -> bool:
    """Compare a line with the page's: all but times, rates and memory, and the last digits of what
    a framework's training makes.
    """
    lines = [MEASURED.sub("…", line) for line in (shown, printed)]
    words, others = (NUMBER.sub("#", " ".join(line.split())) for line in lines)
    return words == others and all(
        near(*pair) for pair in zip(*(NUMBER.findall(line) for line in lines), strict=True)
    )


def near(shown: str, printed: str) -> bool:
    """Return whether two numbers are equal, or for fractions near enough."""
    if "e-" in printed:  # a difference of floating-point sums
        return float(shown) < 100 * float(printed)
    if "." in printed:
        return isclose(float(shown), float(printed), rel_tol=0.09, abs_tol=0.02)
    return shown == printed


def all_alike(shown: str, printed: str) -> bool:
    lines, wanted = shown.splitlines(), printed.splitlines()
    return len(lines) == len(wanted) and all(map(alike, lines, wanted))


def shell(commands: str) -> str:
    done = subprocess.run(["bash", "-ec", commands], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{commands}{done.stdout}{done.stderr}")
    return done.stdout


def paste(page: Path, folder: Path) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    for number, block in enumerate(blocks(page)):
        if not block.runs():
            continue
        path = folder.with_name(f"{page.stem}-{number}.py")
        path.write_text(block.code)  # for the lines of a traceback
        with contextlib.redirect_stdout(io.StringIO()) as output:
            if block.language == "sh":
                print(shell(block.code), end="")
            else:
                exec(compile(block.code, str(path), "exec"), vars(main))
        printed = output.getvalue().replace(str(folder), "/home/you")
        if block.printed and not all_alike(printed, block.printed):
            raise AssertionError(f"{page.name}: {block.code}\n{printed}")


if __name__ == "__main__":
    warnings.filterwarnings("error", module="twinfeed|__main__")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for name in sys.argv[2:]:
        home = Path(sys.argv[1], Path(name).stem)
        home.mkdir()
        os.chdir(home)
        print(name, flush=True)
        paste(Path(name), home)
