"""The library's threads that a test started: TensorFlow keeps those of earlier datasets alive."""

import threading

before: list[threading.Thread] = []


def started_threads() -> list[str]:
    """The names of the library's threads that were not there when the test began."""
    now = [thread for thread in threading.enumerate() if thread not in before]
    return [thread.name for thread in now if "twinfeed" in thread.name]
