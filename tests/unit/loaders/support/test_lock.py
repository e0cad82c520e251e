"""A lock that stays with an object through a fork and a pickle."""

import multiprocessing
import pickle
import threading

from twinfeed.loaders.support.lock import Lock

LOCK = Lock()


def locked_elsewhere(lock: Lock) -> bool:
    """Whether another thread has to wait."""
    entered = threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    threading.Thread(target=enter, daemon=True).start()
    return not entered.wait(0.2)


def locked_in_child() -> bool:
    return locked_elsewhere(LOCK)


def test_child_and_pickle_have_a_lock_that_nobody_has_locked() -> None:
    with LOCK, LOCK:
        assert locked_elsewhere(LOCK)
        assert not locked_elsewhere(pickle.loads(pickle.dumps(LOCK)))
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert not pool.apply(locked_in_child)
    assert not locked_elsewhere(LOCK)
