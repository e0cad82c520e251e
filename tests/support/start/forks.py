"""Run programs in forks of processes that have imported the programs' frameworks, and no more.

`python forks.py LISTENER` serves until its standard input ends, and `stand_in.py` asks it.
Importing TensorFlow or torch takes seconds, half of the time of a short program.

A program has what a new interpreter would give it: arguments, environment, folder, paths, streams,
limits, a main module, and an end of its own. It imports the library itself.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import runpy
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from importlib import import_module
from select import select
from socket import recv_fds, send_fds, socket, socketpair
from types import ModuleType, TracebackType
from typing import Any

Asked = tuple[dict[str, Any], list[int]]
"""A program, and its standard streams."""

# What the interpreter itself searches.
PATHS = [one for one in sys.path[1:] if one not in os.environ.get("PYTHONPATH", "").split(":")]

# What frameworks read when they are imported, and never again.
READ_EARLY = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TF_CPP_MIN_LOG_LEVEL")


def serve(listener: socket) -> Asked:
    """Hand each program to the process that has its imports; return in a fork, with a program."""
    importers: dict[str, socket] = {}
    while sys.stdin not in select([listener, sys.stdin], [], [])[0]:
        waiting, _ = listener.accept()
        _, files, _, _ = recv_fds(waiting, 1, 4)
        program = described(files[0])
        early = [program["environment"].get(name) for name in READ_EARLY]
        key = json.dumps([program["imports"], early])
        if key not in importers:
            importers[key], asking = socketpair()
            if not os.fork():
                close(listener, waiting, *importers.values(), *files)
                return import_and_fork(asking, program)
            close(asking)
        try:
            send_fds(importers[key], [b"."], [waiting.fileno(), *files])
        except BrokenPipeError:  # its imports failed, and it has said how
            close(importers.pop(key))
        close(waiting, *files)
    sys.exit()


def import_and_fork(asking: socket, first: dict[str, Any]) -> Asked:
    """Import what a program imports, then fork for each program; return in a fork."""
    os.environ.clear()
    os.environ.update(first["environment"])
    for name in first["imports"]:
        with suppress(ModuleNotFoundError):  # a program that needs it says so itself
            import_module(name)
    gc.freeze()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket] = {}
    while True:
        ready = select([asking, woken, *running.values()], [], [])[0]
        if asking in ready:
            said, received, _, _ = recv_fds(asking, 1, 5)
            if not said:
                sys.exit()
            waiting, program = socket(fileno=received[0]), described(received[1])
            child = os.fork()
            if not child:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                close(asking, woken, wakes, waiting, *running.values(), received[1])
                return program, received[2:]
            running[child] = waiting
            waiting.sendall(child.to_bytes(8, "big"))
            close(*received[1:])
        if woken in ready:
            os.read(woken, 1 << 16)
        for child, waiting in [*running.items()]:
            if waiting in ready:  # who waited is gone
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                with suppress(OSError):
                    waiting.sendall(status.to_bytes(8, "big"))
                close(running.pop(child))


def described(file: int) -> dict[str, Any]:
    """Return what a file says of a program."""
    program: dict[str, Any] = json.loads(os.pread(file, os.fstat(file).st_size, 0))
    return program


def close(*files: socket | int) -> None:
    for file in files:
        os.close(file if isinstance(file, int) else file.detach())


def begin(program: dict[str, Any], streams: list[int]) -> None:
    """Give this process what a new interpreter has."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    close(*streams)
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    for name, limits in program["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    own = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    sys.path[:] = dict.fromkeys([*own, *PATHS])


def run(words: list[str]) -> None:
    """Run the arguments of an interpreter: `-u`, `-W`, and a script, `-c` or `-m`."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while words[0] in ("-u", "-W"):
        if words[0] == "-u":
            unbuffered = True
        else:
            words = words[1:]
            sys.warnoptions.append(words[0])
            warnings.simplefilter(words[0])  # type: ignore[arg-type]
        words = words[1:]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=unbuffered)  # type: ignore[union-attr]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # as the interpreter does
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = words
        main.__file__ = os.path.abspath(words[0])
        sys.path.insert(0, os.path.dirname(main.__file__))
        with open(main.__file__, "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
        exec(code, vars(main))


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as if the program had been called by nobody."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


if __name__ == "__main__":
    asked, its_streams = serve(socket(fileno=int(sys.argv[1])))
    begin(asked, its_streams)
    sys.excepthook = show
    run(asked["arguments"])
