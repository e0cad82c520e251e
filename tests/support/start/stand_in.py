"""Act as an interpreter: let `forks.py` run a program, and end as the program ends."""

import json
import os
import re
import resource
import signal
import socket
import sys
import tempfile

IMPORT = r"(?m)^\s*(?:from|import) (?:twinfeed\.loaders\.|support\.)?({})(?:_feeds)?\b"
# What is imported for a program that imports any of these: few sets, as each has a process. The
# stories' data are scikit-learn's, and torch's optimisers import half of torch when one is made.
IMPORTS = {
    "torch|accelerate|lightning|transformers": [
        "torch",
        "torch._dynamo",
        "sklearn.datasets",
        "lightning",
    ],
    "tensorflow|keras": ["keras", "tensorflow", "sklearn.datasets"],
    "digits": ["sklearn.datasets"],
}


def imports(words: list[str]) -> list[str]:
    """Find what to import for a program in its text, and in the words and texts that it is given.

    A program for another of Keras's backends imports Keras itself, and then what this imports.
    """
    texts = [*words, *map("import {}".format, words), *map(text_of, words)]
    chooses = os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow"
    chooses |= any('environ["KERAS_BACKEND"] = ' in text for text in texts)
    found = (
        names
        for wanted, names in IMPORTS.items()
        if any(re.search(IMPORT.format(wanted), text) for text in texts)
        and not (chooses and "keras" in names)
    )
    return list(dict.fromkeys(name for names in found for name in names))


def text_of(word: str) -> str:
    """Return what a file of Python or a page says."""
    if not word.endswith((".md", ".py")):
        return ""
    with open(word) as file:
        return file.read()


def main() -> None:
    """Ask for the program, pass signals on to it, and wait for its end."""
    program = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "imports": imports(sys.argv[1:]),
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in ("RLIMIT_NOFILE", "RLIMIT_FSIZE")
        },
    }
    with socket.socket(socket.AF_UNIX) as forks, tempfile.TemporaryFile("w") as file:
        forks.connect(os.environ["TESTS_FORKS"])
        json.dump(program, file)
        file.flush()
        socket.send_fds(forks, [b"."], [file.fileno(), 0, 1, 2])
        child = int.from_bytes(forks.recv(8, socket.MSG_WAITALL), "big")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: os.kill(child, number))
        said = forks.recv(8, socket.MSG_WAITALL)
    if not said:
        sys.exit("the process that runs programs in forks is gone")
    code = os.waitstatus_to_exitcode(int.from_bytes(said, "big"))
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
