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


def test_a_forked_child_has_a_value_of_its_own() -> None:
    """Else it would wait for a lock that a thread of its parent had locked."""
    with LOCK():
        assert OWNER() == os.getpid()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            owner, locked = pool.apply(in_child)
        assert owner != os.getpid()
        assert not locked
        assert LOCK().locked()


def test_a_pickle_has_no_value_and_a_value_that_was_taken_out_is_made_anew() -> None:
    lists: PerProcess[list[int]] = PerProcess(list)
    assert lists.pop() is None
    lists().append(1)
    assert pickle.loads(pickle.dumps(lists))() == []
    assert lists.pop() == [1]
    assert lists() == []
