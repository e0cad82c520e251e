"""What each process makes for itself."""

import multiprocessing
import os
import pickle
import threading

from twinfeed.loaders.support.fork import PerProcess

OWNER = PerProcess(os.getpid)
LOCK = PerProcess(threading.Lock)


def in_child() -> tuple[int, bool]:
    return OWNER(), LOCK().locked()


def test_forked_child_has_its_own_value() -> None:
    """Else it would wait for a lock that a thread of its parent had locked."""
    with LOCK():
        assert OWNER() == os.getpid()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            owner, locked = pool.apply(in_child)
        assert owner != os.getpid()
        assert not locked
        assert LOCK().locked()


def test_value_is_recreated_after_pickle_and_pop() -> None:
    lists: PerProcess[list[int]] = PerProcess(list)
    assert lists.pop() is None
    lists().append(1)
    assert pickle.loads(pickle.dumps(lists))() == []
    assert lists.pop() == [1]
    assert lists() == []
