"""Fixtures and hooks of all tests, and which tests need no framework."""

import ast
import gc
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import threads
from support.servers import RangeServer

FRAMEWORKS = {
    "accelerate",
    "grain",
    "jax",
    "keras",
    "lightning",
    "matplotlib",
    "tensorflow",
    "torch",
    "torchdata",
}
BACKENDS = tuple(
    f"twinfeed.loaders.{name}" for name in ("grain", "jax", "torch", "tensorflow", "pictures")
)
HERE = Path(__file__).parent
START = HERE / "support" / "start"


# No test asserts a time, and a machine may be as slow as it likes.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# CI has all examples where the frameworks are left out, on each Python.
settings.register_profile("few examples", settings.get_profile("any machine"), max_examples=25)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-frameworks",
        action="store_true",
        help="leave out the files that import a framework, and the tests marked `frameworks`",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C reach the processes that tests start: a shell's background jobs ignore it.

    Collect no garbage while the frameworks are imported, which make a million objects that stay,
    and little in the processes that tests start (support/start/sitecustomize.py). These keep the
    bytecode of what they import, also where a container forbids it, and do not each compile it
    anew. Numpy's threads, which spin for a twentieth of a second in each new process, are not
    started. The processes import `support` as tests do.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    without = config.getoption("without_frameworks")
    settings.load_profile("any machine" if without else "few examples")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()
    paths = [str(START), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not hasattr(config, "workerinput"):
        use_own_temporary_folder()
    if not (without or hasattr(config, "workerinput")):
        config.add_cleanup(serve_forks())


def use_own_temporary_folder() -> None:
    """Give the run a folder for temporary files, which is deleted with what was left there.

    Each download looks through this folder for what killed processes left. `tmp_path` stays where
    it is, to look at after a failure. The folder of multiprocessing, in it, is deleted at -100.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
    Finalize(None, shutil.rmtree, args=(tempfile.tempdir, True), exitpriority=-200)


def serve_forks() -> Callable[[], None]:
    """Begin to run programs in forks, for `launching.PYTHON`; return what ends it."""
    folder = tempfile.TemporaryDirectory()
    path, python = f"{folder.name}/socket", Path(folder.name, "python")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {START}/stand_in.py "$@"\n')
    python.chmod(0o755)
    os.environ |= {"TESTS_FORKS": path, "TESTS_PYTHON": str(python)}
    with socket.socket(socket.AF_UNIX) as listener:  # listens before anybody asks
        listener.bind(path)
        listener.listen(64)
        # In a session of its own, as Ctrl-C is for the programs.
        forks = subprocess.Popen(
            [sys.executable, f"{START}/forks.py", str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        forks.communicate()
        folder.cleanup()

    return end


def pytest_collection_finish() -> None:
    """Leave what the imports made out of every later collection of garbage."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one process, in their order: what a file's tests share is made once."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what cannot be imported; what is left and fails is to be marked `frameworks`."""
    if config.getoption("without_frameworks") and collection_path.suffix == ".py":
        return needs_framework(collection_path) or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("without_frameworks"):
        left_out = [item for item in items if item.get_closest_marker("frameworks")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.getoption("without_frameworks"):
        return []
    names = [path.name for path in sorted(HERE.rglob("test_*.py")) if needs_framework(path)]
    return [f"files of tests left out, as they need a framework: {' '.join(names)}"]


@cache
def needs_framework(path: Path) -> bool:
    """Return whether a file is a backend's by its folder, or it or a helper imports a framework."""
    if path.parent in (HERE / "backends" / "tensorflow", HERE / "backends" / "torch"):
        return True
    for name in imports(ast.parse(path.read_text()).body):
        helper = HERE / f"{name.replace('.', '/')}.py"
        if name.partition(".")[0] in FRAMEWORKS or name.startswith(BACKENDS):
            return True
        if helper.exists() and needs_framework(helper):
            return True
    return False


def imports(body: list[ast.stmt]) -> set[str]:
    """The modules that these statements import; a function's own imports come with its call."""
    names = set()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.fixture(autouse=True)
def _threads_before() -> None:
    threads.before[:] = threading.enumerate()


@pytest.fixture(params=[0, 3000], ids=["off", "on"])
def readahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: with the planner off, and with the planner on.

    By default the planner sleeps, as the pages of small local shards are warm. The helpers that
    make batches and loaders take this number.
    """
    from support import batches

    monkeypatch.setattr(batches, "readahead", request.param)


@pytest.fixture(scope="module", autouse=True)
def _leave_out_what_stays() -> Iterator[None]:
    """Look no more for garbage among what earlier modules left: Keras collects for each model."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _trace_tensorflow() -> Iterator[None]:
    """Show to coverage what TensorFlow's own threads run: `threading` starts none of them and hands
    its trace function to no other.
    """
    calls = sys.modules.get("twinfeed.loaders.tensorflow._callbacks")
    trace = threading.gettrace()
    if calls is None or trace is None:
        yield
        return
    untraced = calls._registered_object

    def traced(*arguments: Any) -> Any:
        sys.settrace(trace)
        return untraced(*arguments)

    calls._registered_object = traced  # type: ignore[attr-defined]
    yield
    calls._registered_object = untraced  # type: ignore[attr-defined]


@pytest.fixture
def mapped_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Map the arrays of indexes, however small they are."""
    from support.inside import arrays

    monkeypatch.setattr(arrays, "MAX_READ_BYTES", 0)


@pytest.fixture
def graphs_as_written() -> Iterator[None]:
    """Run TensorFlow's graphs as they are made: to rewrite them takes a fifth of the time of tests
    that make many small graphs.
    """
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that changes limits of the network, as in `network(requests=1)`."""
    from support.inside import retries

    def change(**limits: Any) -> None:
        monkeypatch.setattr(retries, "NETWORK", replace(retries.NETWORK, **limits))

    return change


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    """A web server of the test's folder."""
    with RangeServer(tmp_path) as serving:
        yield serving


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A store that speaks S3, and its URL; made-up credentials lead there."""
    import moto.backends
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ACCESS_KEY_ID": "made-up",
        "AWS_SECRET_ACCESS_KEY": "made-up",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        # At each request it would look through its own folder, and write a line.
        patch.setattr(moto.backends, "list_of_moto_modules", lambda: ["s3"])
        patch.setattr(logging.getLogger("werkzeug"), "disabled", True)
        create = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
        urllib.request.urlopen(create).close()
        yield "s3://bucket"
    server.stop()
