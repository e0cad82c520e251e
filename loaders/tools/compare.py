"""Run one feed through several frameworks, each in a process of its own: what differs, and how fast
each is. Batches are compared by checksums, and arrays are only fetched if these differ.
"""

from __future__ import annotations

import importlib
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain, islice, repeat, zip_longest
from typing import Any, NamedTuple

import numpy as np

from twinfeed.loaders.batches.feed import Feed, require_feed
from twinfeed.loaders.errors import ADVISE_IMPORTABLE, WorkerDiedError, pickled
from twinfeed.loaders.feed.collate import Ragged
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Array, as_array
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.loaders.support.extras import not_installed_error
from twinfeed.loaders.support.pool import Pool
from twinfeed.loaders.tools.backends import BACKENDS, Backend
from twinfeed.samplers import validate
from twinfeed.samplers.verdict import Verdict

Step = Callable[[Mapping[str, Any]], Any]
_MAX_FETCHED = 4  # the number of batches whose arrays are compared for each field that differs


@dataclass(frozen=True)
class BackendRun:
    """The results of one backend: checksums of its batches, speed and memory.

    Attributes:
        first: seconds to the first batch.
        seconds: seconds of all batches after the first.
        rate: records per second, after the first batch. None if there is only one batch.
        memory: the largest resident size of the backend's process, in bytes.
        sums: for each batch, a checksum of each field by name.
        losses: what the backend's step returned for each batch, if there is a step.

    >>> run = BackendRun("torch", 64, first=0.5, seconds=2.0, rate=32.0, memory=1 << 28, sums=())
    >>> run.rate
    32.0
    """

    backend: str
    records: int
    first: float
    seconds: float
    rate: float | None
    memory: int
    sums: tuple[Mapping[str, int], ...] = field(repr=False)
    losses: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Comparison(Verdict):
    """The result of `compare`; printed, a table of the backends, and a line for each field.

    Attributes:
        runs: what each backend delivered.
        differing: for each field that differs, the batches in which it does, counted from 0 over
            all epochs.
        largest: the largest absolute difference of each numeric field that differs, in the first
            few batches that differ. None if shapes or types differ.

    >>> Comparison((), {}, {}).ok
    True
    """

    runs: tuple[BackendRun, ...]
    differing: Mapping[str, Sequence[int]]
    largest: Mapping[str, float | None]

    @property
    def findings(self) -> list[str]:
        """The fields that differ, a sentence each."""
        return [self._describe(name) for name in sorted(self.differing)]

    @property
    def first(self) -> int | None:
        """The first batch that differs in any field: the first step whose inputs differ."""
        return min((batches[0] for batches in self.differing.values()), default=None)

    @property
    def loss_differences(self) -> tuple[float | None, ...]:
        """For each run, the largest difference of its losses from those of the first run.

        Only the steps before `self.first` count, the first step whose inputs differ between the
        runs. None for a run without losses of such steps.
        """
        losses = [np.array(run.losses[: self.first]) for run in self.runs]
        return tuple(float(np.abs(x - losses[0]).max()) if len(x) else None for x in losses)

    def __str__(self) -> str:
        rows = [["backend", "records/s", "first batch", "peak memory"]]
        for run in self.runs:
            rate = "-" if run.rate is None else f"{run.rate:,.0f}"
            rows.append([run.backend, rate, f"{run.first:.2f} s", f"{run.memory >> 20:,} MiB"])
        if any(run.losses for run in self.runs):
            rows[0].append("losses apart")
            for row, loss in zip(rows[1:], self.loss_differences, strict=True):
                row.append("-" if loss is None else f"{loss:.2g}")
        lines = [f"{name:12}{''.join(map('{:>13}'.format, row))}" for name, *row in rows]
        fields = {name for run in self.runs for sums in run.sums for name in sums}
        return "\n".join([*lines, *map(self._describe, sorted(fields))])

    def _describe(self, name: str) -> str:
        """Return a sentence that says whether a field differs, in which batches, by how much."""
        if name not in self.differing:
            return f"{name}: the same"
        batches, largest = self.differing[name], self.largest.get(name)
        total = len(self.runs[0].sums)
        text = f"{name}: differs in {len(batches)} of {total} batches, first in {batches[0]}"
        return text if largest is None else f"{text}, by {largest:g} at most"


def compare(
    feed: Feed,
    /,
    *,
    backends: Sequence[str] = ("torch", "tensorflow"),
    steps: Sequence[Callable[[], Step]] | None = None,
    batches: int | None = None,
    readahead: int | None = None,
) -> Comparison:
    """Run a feed through each backend from epoch 0 on, and compare what arrives.

    Each backend runs in a process of its own. So all callables must pickle, and a script must guard
    its start (`if __name__ == "__main__"`).

    With `steps`, each backend trains on the batches too. The result has the first step whose inputs
    differ, and the largest difference of the losses before this step.

    Args:
        feed: what is compared.
        backends: at least two names of `BACKENDS`: "numpy", "torch", "tensorflow", "jax", which
            here has 64 bits, and the backends that you add.
        steps: a function for each backend, in the order of `backends`. The backend's process calls
            it once. It builds a model, and returns a function that trains the model on one batch
            and returns the loss.
        batches: how many batches. Default: an epoch.
        readahead: the option of each loader.

    Raises:
        ValueError: an unknown backend, or `steps` without one function for each backend. Errors of
            the backends are raised too.
        ModuleNotFoundError: a backend is not installed.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> feed = Feed(index, ExactOnceBatchSampler(3, batch_size=2))
    >>> found = compare(feed, backends=["numpy", "numpy"])
    >>> found.ok, found.runs[0].records
    (True, 3)

    A function for `steps`, in a script or a module::

        def torch_step():
            model = torch.nn.Linear(64, 10)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(batch):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(batch["pixels"]), batch["label"])
                loss.backward()
                optimizer.step()
                return loss.item()

            return step
    """
    require_feed(feed)
    if len(backends) < 2 or not set(backends) <= BACKENDS.keys():
        raise ValueError(f"backends must be at least two of {', '.join(BACKENDS)}, got {backends}")
    makers = [None] * len(backends) if steps is None else steps
    is_list = isinstance(makers, Sequence) and len(makers) == len(backends)
    if not is_list or not all(maker is None or callable(maker) for maker in makers):
        raise ValueError(
            f"steps must be a list of {len(backends)} functions, one per backend, got {steps!r}"
        )
    count = len(feed) if batches is None else validate.integer("batches", batches, minimum=1)
    for name in backends:
        if find_spec(needs := BACKENDS[name].needs) is None:
            raise not_installed_error(f"compare with backend {name!r}", needs, name)
    options = {"readahead": readahead}
    jobs = [
        _Job(name, BACKENDS[name], feed, count, options, maker)
        for name, maker in zip(backends, makers, strict=True)
    ]
    runs = [_run_in_process(_measure, job) for job in jobs]
    differing = _differing_batches([run.sums for run in runs])
    to_fetch = {batch for numbers in differing.values() for batch in numbers[:_MAX_FETCHED]}
    fetched = [_run_in_process(_fetch, job, to_fetch) for job in jobs] if to_fetch else []
    largest = {
        name: _largest_difference(
            [arrays[batch].get(name) for arrays in fetched] for batch in numbers[:_MAX_FETCHED]
        )
        for name, numbers in differing.items()
    }
    return Comparison(tuple(runs), differing, largest)


class _Job(NamedTuple):
    """The task of a backend's process; `batches` is the number of batches to iterate over."""

    name: str
    backend: Backend
    feed: Feed
    batches: int
    options: Mapping[str, Any]
    make_step: Callable[[], Step] | None


def _run_in_process(function: Callable[..., Any], job: _Job, *arguments: Any) -> Any:
    """Call `function(job, *arguments)` in a new process; return its result or raise its error."""
    # Pickle the job here first, only to see whether this raises an error. Within `pickled`, the
    # error becomes a LoaderError that says what to do.
    with pickled():
        pickle.dumps((job, arguments))
    try:
        with Pool(1) as pool:
            return pool.submit(function, job, *arguments).result()
    except BrokenProcessPool as error:
        # A likely cause is a script that a new process cannot import: advise how to write it.
        raise WorkerDiedError(str(error), advice=ADVISE_IMPORTABLE) from error
    except Exception as error:
        error.add_note(f"in backend {job.name!r}")
        raise


def _measure(job: _Job) -> BackendRun:
    """Iterate over a backend's batches twice: for times, and then for checksums and losses."""
    start = time.perf_counter()
    batches = _iterate(job)
    first_records = len(next(batches)["id"])
    first_end = time.perf_counter()
    later_records = sum(len(batch["id"]) for batch in batches)
    seconds = time.perf_counter() - first_end
    memory = system.peak_memory()
    sums: list[dict[str, int]] = []
    losses: list[float] = []
    step: Any = job.make_step and job.make_step()
    for batch in _iterate(job):
        arrays = _as_arrays(batch, job.backend)
        sums.append({name: _checksum(array) for name, array in arrays.items()})
        if job.make_step is not None:
            losses.append(float(step(batch)))
    return BackendRun(
        backend=job.name,
        records=first_records + later_records,
        first=first_end - start,
        seconds=seconds,
        rate=later_records / seconds if later_records else None,
        memory=memory,
        sums=tuple(sums),
        losses=tuple(losses),
    )


def _fetch(job: _Job, wanted: set[int]) -> dict[int, dict[str, Array]]:
    """Return {batch number: {field: array}} for the batches with the numbers `wanted`."""
    batches = enumerate(_iterate(job))
    return {number: _as_arrays(batch, job.backend) for number, batch in batches if number in wanted}


def _iterate(job: _Job) -> Iterator[Any]:
    """Yield the first `job.batches` batches of a backend's loader, over epochs as needed."""
    os.environ["JAX_ENABLE_X64"] = "1"  # otherwise JAX would round 64-bit numbers to 32 bits
    loader_class = getattr(importlib.import_module(job.backend.module), job.backend.loader)
    with loader_class(job.feed, **job.backend.options, **job.options) as loader:
        loader.set_epoch(0)  # so that it does not warn: this is called several times
        num_epochs = -(-job.batches // max(1, len(loader)))  # rounded up
        yield from islice(chain.from_iterable(repeat(loader, num_epochs)), job.batches)


def _as_arrays(batch: Mapping[str, Any], backend: Backend) -> dict[str, Array]:
    """Convert the values of a batch to numpy arrays, by name; a `Ragged` becomes two arrays."""
    arrays = {}
    for name, value in batch.items():
        value = value if backend.to_numpy is None else backend.to_numpy(value)
        if isinstance(value, Ragged):
            values, lengths = value
            values = _bytes_array(values) if values.dtype == object else values
            arrays[f"{name}.values"], arrays[f"{name}.lengths"] = values, lengths
        else:
            arrays[name] = _bytes_array(value) if isinstance(value, list) else as_array(value)
    return arrays


def _bytes_array(strings: Iterable[bytes | str]) -> Array:
    """Return strings as an array of bytes objects, since TensorFlow has no other strings."""
    encoded = [string.encode() if isinstance(string, str) else string for string in strings]
    return np.array(encoded, object)


def _checksum(array: Array) -> int:
    """Return a checksum of the shape, the dtype and the values of an array."""
    if array.dtype == object:
        return crc32c(repr(array.tolist()).encode())
    return crc32c(f"{array.shape} {array.dtype}".encode() + array.tobytes())


def _differing_batches(sums: Sequence[Sequence[Mapping[str, int]]]) -> dict[str, list[int]]:
    """Return {field: the numbers of the batches in which its checksum differs between backends}."""
    differing: dict[str, list[int]] = {}
    for number, batch_sums in enumerate(zip_longest(*sums, fillvalue={})):
        for name in {name for fields in batch_sums for name in fields}:
            if len({fields.get(name) for fields in batch_sums}) > 1:
                differing.setdefault(name, []).append(number)
    return differing


def _largest_difference(batches: Iterable[Sequence[Array | None]]) -> float | None:
    """Return the largest difference of a field; None for other dtypes, shapes or no numbers."""
    largest = 0.0
    for first, *later in batches:
        for array in later:
            if first is None or array is None or first.dtype.kind not in "biuf":
                return None
            if first.shape != array.shape or first.dtype != array.dtype:
                return None
            difference = np.abs(first.astype(np.float64) - array.astype(np.float64))
            largest = max(largest, float(difference.max(initial=0)))
    return largest
