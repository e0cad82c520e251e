"""The question of cost: seconds, memory, and the size of the pickle."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twinfeed.loaders.audit.evidence import Evidence
from twinfeed.loaders.audit.report import Answer, note


def ask_cost(evidence: Evidence) -> Iterator[Answer]:
    """Measure once what construction, the first item and 10^6 ids cost."""
    evidence.need_one_process()
    maker, world_size = evidence.maker, evidence.world_size
    with maker.running("cost", 0, world_size):
        started = time.perf_counter()
        sampler = maker.build(rank=0, world_size=world_size, epoch=0)
        built = time.perf_counter()
        items = iter(sampler)
        next(items, None)
        first = time.perf_counter()
        count = len(maker.read(items).ids)
        ended = time.perf_counter()
        pickled = _pickled(sampler)
        with _traced() as peak:
            sampler = maker.build(rank=0, world_size=world_size, epoch=0)
            next(iter(sampler), None)
            megabytes = peak() / 1e6
    million = f"{1e6 * (ended - first) / count:.2g} s for 10^6 ids" if count else "no further ids"
    yield note(
        f"{1e3 * (built - started):.1f} ms to build, {1e3 * (first - built):.1f} ms to the first, "
        f"{million}, {megabytes:.1f} MB of Python's memory to the first, {pickled}"
    )


@contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    """Trace the memory of a block; the function returns its peak, in bytes."""
    was_tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:  # the caller may trace, too
            tracemalloc.stop()


def _pickled(sampler: object) -> str:
    try:
        return f"{len(pickle.dumps(sampler)):,} B pickled"
    except Exception as error:
        return f"it does not pickle ({type(error).__name__})"
