"""Processes and the process that started them."""

from __future__ import annotations

import os
import threading
from functools import cache
from multiprocessing import parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

# Seconds between two looks at the parent.
_INTERVAL = 1.0


@cache
def end_with_parent() -> None:
    """End this child process of multiprocessing soon after its parent, which may be killed.

    A child that reads from a pipe, or writes to a full one, may have the pipe's other end itself:
    it would wait for ever. Elsewhere than in a child, nothing happens.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent, os.getppid()), daemon=True).start()


def _watch(parent: BaseProcess, above: int) -> None:
    # A process that was forked after this one may keep the sentinel's pipe open, and the parent of
    # a child of a fork server is the server.
    while os.getppid() == above and not wait([parent.sentinel], _INTERVAL):
        pass
    os._exit(1)
