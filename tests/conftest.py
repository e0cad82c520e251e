"""What holds for all tests."""

import signal
import threading

import pytest
import running


def pytest_configure() -> None:
    """Let Ctrl-C reach the processes that tests start: a shell's background jobs ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _threads_before() -> None:
    running.before[:] = threading.enumerate()
