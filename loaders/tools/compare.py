"""Run one feed through several frameworks: what differs, how fast each is, how trainings part.

Each backend runs in a process of its own, so that times and memory are its own. Their batches are
compared one by one through checksums. If checksums differ, the arrays themselves are fetched, to
say by how much.
"""

from __future__ import annotations

import importlib
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from itertools import chain, islice, repeat, zip_longest
from typing import Any, NamedTuple

import numpy as np

from twinfeed.loaders.errors import IMPORTABLE, WorkerDiedError, pickled
from twinfeed.loaders.feed.collate import Ragged
from twinfeed.loaders.making.feed import Feed, check_feed
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Array, as_array
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.loaders.support.extras import not_installed_error
from twinfeed.loaders.support.pool import Pool
from twinfeed.loaders.tools.backends import BACKENDS, Backend
from twinfeed.samplers import validate

Step = Callable[[Mapping[str, Any]], Any]
_KEPT = 4  # batches that differ whose arrays are fetched, for each field


class Run(NamedTuple):
    """What one backend delivered, how fast, and what it cost.

    Attributes:
        first: seconds to the first batch.
        seconds: seconds of all batches after the first.
        rate: records per second, after the first batch. None if there is no other.
        memory: the largest resident size of the backend's process, in bytes.
        sums: a checksum for each field of each batch.
        losses: what the backend's step returned for each batch, if there is a step.

    >>> Run("torch", records=64, first=0.5, seconds=2.0, rate=32.0, memory=1 << 28, sums=()).rate
    32.0
    """

    backend: str
    records: int
    first: float
    seconds: float
    rate: float | None
    memory: int
    sums: tuple[Mapping[str, int], ...]
    losses: tuple[float, ...] = ()


class Comparison(NamedTuple):
    """The result of `compare`; printed, a comparison is a table.

    Attributes:
        runs: what each backend delivered.
        differing: for each field that differs, the batches in which it does, counted from 0 over
            all epochs.
        worst: the largest absolute difference of each numeric field that differs, in the first few
            batches that differ. None if shapes or types differ.

    >>> Comparison((), {}, {}).equal
    True
    """

    runs: tuple[Run, ...]
    differing: Mapping[str, Sequence[int]]
    worst: Mapping[str, float | None]

    @property
    def equal(self) -> bool:
        """Whether every backend delivered the same ids, bytes and arrays in every batch."""
        return not self.differing

    @property
    def first(self) -> int | None:
        """The first batch that differs in any field: the first step whose inputs differ."""
        return min((places[0] for places in self.differing.values()), default=None)

    @property
    def apart(self) -> tuple[float | None, ...]:
        """The largest difference of each run's losses to the first run's.

        Only steps before `first` count. None if there are none, or no losses.
        """
        losses = [np.array(run.losses[: self.first]) for run in self.runs]
        return tuple(float(np.abs(x - losses[0]).max()) if len(x) else None for x in losses)

    def __repr__(self) -> str:
        rows = [["backend", "records/s", "first batch", "peak memory"]]
        for run in self.runs:
            rate = "-" if run.rate is None else f"{run.rate:,.0f}"
            rows.append([run.backend, rate, f"{run.first:.2f} s", f"{run.memory >> 20:,} MiB"])
        if any(run.losses for run in self.runs):
            parted = ["-" if apart is None else f"{apart:.2g}" for apart in self.apart]
            rows = [[*row, cell] for row, cell in zip(rows, ["losses apart", *parted], strict=True)]
        lines = [f"{name:12}{''.join(map('{:>13}'.format, row))}" for name, *row in rows]
        batches = len(self.runs[0].sums) if self.runs else 0
        for name in sorted({name for run in self.runs for sums in run.sums for name in sums}):
            verdict = "the same"
            if places := self.differing.get(name):
                verdict = f"differs in {len(places)} of {batches} batches, first in {places[0]}"
            if self.worst.get(name) is not None:
                verdict += f", by {self.worst[name]:g} at most"
            lines.append(f"{name}: {verdict}")
        return "\n".join(lines)


def compare(
    feed: Feed,
    /,
    *,
    backends: Sequence[str] = ("torch", "tensorflow"),
    steps: Sequence[Callable[[], Step]] | None = None,
    batches: int | None = None,
    checksums: bool = True,
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
        checksums: what each loader is given.
        readahead: what each loader is given.

    Raises:
        ValueError: other backends, or `steps` without one function for each backend. What the
            backends raise is raised too.
        ModuleNotFoundError: a backend is not installed.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> feed = Feed(index, ExactOnceBatchSampler(3, batch_size=2))
    >>> found = compare(feed, backends=["numpy", "numpy"])
    >>> found.equal, found.runs[0].records
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
    check_feed(feed)
    if len(backends) < 2 or not set(backends) <= BACKENDS.keys():
        raise ValueError(f"backends must be at least two of {', '.join(BACKENDS)}, got {backends}")
    made: Sequence[Callable[[], Step] | None] = steps or [None] * len(backends)
    if len(made) != len(backends):
        raise ValueError(f"steps must be one function a backend, {len(backends)}, got {len(made)}")
    most = len(feed) if batches is None else validate.integer("batches", batches, minimum=1)
    for name in backends:
        if find_spec(needs := BACKENDS[name].needs) is None:
            raise not_installed_error(f"compare with backend {name!r}", needs, name)
    how = {"checksums": checksums, "readahead": readahead}
    jobs = [
        _Task(name, BACKENDS[name], feed, most, how, step)
        for name, step in zip(backends, made, strict=True)
    ]
    runs = [_alone(_run, job) for job in jobs]
    places = _differing([run.sums for run in runs])
    wanted = {place for found in places.values() for place in found[:_KEPT]}
    kept = [_alone(_keep, job, wanted) for job in jobs] if wanted else []
    worst = {
        name: _worst([arrays[place].get(name) for arrays in kept] for place in found[:_KEPT])
        for name, found in places.items()
    }
    return Comparison(tuple(runs), places, worst)


class _Task(NamedTuple):
    name: str
    backend: Backend
    feed: Feed
    batches: int
    how: Mapping[str, Any]
    make_step: Callable[[], Step] | None


def _alone(function: Callable[..., Any], job: _Task, *arguments: Any) -> Any:
    """Call in a new process; return its result or raise its error."""
    with pickled():
        pickle.dumps((job, arguments))
    try:
        with Pool(1) as pool:
            return pool.submit(function, job, *arguments).result()
    except BrokenProcessPool as error:
        raise WorkerDiedError(str(error), advice=IMPORTABLE) from error
    except Exception as error:
        error.add_note(f"in backend {job.name!r}")
        raise


def _run(job: _Task) -> Run:
    """Time one pass that does nothing else, then checksum and train on a second pass."""
    started = time.perf_counter()
    stream = _deliver(job)
    records = len(next(stream)["id"])
    first = time.perf_counter()
    rest = sum(len(batch["id"]) for batch in stream)
    seconds = time.perf_counter() - first
    memory = system.peak_memory()
    rate = rest / seconds if rest else None
    sums: list[dict[str, int]] = []
    losses: list[float] = []
    step: Any = job.make_step and job.make_step()
    for batch in _deliver(job):
        sums.append({name: _sum(value) for name, value in _flat(batch, job.backend).items()})
        if job.make_step is not None:
            losses.append(float(step(batch)))
    each = tuple(sums), tuple(losses)
    return Run(job.name, records + rest, first - started, seconds, rate, memory, *each)


def _keep(job: _Task, wanted: set[int]) -> dict[int, dict[str, Array]]:
    """Fetch the arrays of some batches."""
    batches = enumerate(_deliver(job))
    return {place: _flat(batch, job.backend) for place, batch in batches if place in wanted}


def _deliver(job: _Task) -> Iterator[Any]:
    """Give the batches as the backend delivers them."""
    os.environ["JAX_ENABLE_X64"] = "1"  # else 64-bit numbers differ from the other backends'
    with _loader_class(job)(job.feed, **job.backend.options, **job.how) as loader:
        passes = repeat(loader, -(-job.batches // max(1, len(loader))))
        yield from islice(chain.from_iterable(passes), job.batches)


def _loader_class(job: _Task) -> Any:
    """Import the backend's loader, which only its own process does."""
    module, loader = job.backend.module, job.backend.loader
    try:
        return getattr(importlib.import_module(module), loader)
    except (AttributeError, ModuleNotFoundError) as error:
        problem = f"backend {job.name!r} is {module}.{loader} in BACKENDS, which cannot be imported"
        raise type(error)(f"{problem}: {error}") from error


def _flat(batch: Mapping[str, Any], backend: Backend) -> dict[str, Array]:
    """Return the values of a batch as numpy arrays, strings as an array of objects."""
    flat = {}
    for name, value in batch.items():
        value = value if backend.to_numpy is None else backend.to_numpy(value)
        if isinstance(value, Ragged):
            values, lengths = value
            values = _strings(values) if values.dtype == object else values
            flat[f"{name}.values"], flat[f"{name}.lengths"] = values, lengths
        else:
            flat[name] = _strings(value) if isinstance(value, list) else as_array(value)
    return flat


def _strings(values: Iterable[bytes | str]) -> Array:
    """Return strings as an array of bytes objects: TensorFlow has no other strings."""
    return np.array([v.encode() if isinstance(v, str) else v for v in values], object)


def _sum(array: Array) -> int:
    """Return one checksum for shape, type and content."""
    if array.dtype == object:
        return crc32c(repr(array.tolist()).encode())
    return crc32c(f"{array.shape} {array.dtype}".encode() + array.tobytes())


def _differing(sums: Sequence[Sequence[Mapping[str, int]]]) -> dict[str, list[int]]:
    """Return the places of the batches that differ, by field."""
    places: dict[str, list[int]] = {}
    for place, batch in enumerate(zip_longest(*sums, fillvalue={})):
        for name in {name for one in batch for name in one}:
            if len({one.get(name) for one in batch}) > 1:
                places.setdefault(name, []).append(place)
    return places


def _worst(batches: Iterable[Sequence[Array | None]]) -> float | None:
    """Return the largest absolute difference to the first backend's arrays, or None."""
    worst = 0.0
    for first, *others in batches:
        for other in others:
            if first is None or other is None or first.dtype.kind not in "biuf":
                return None
            if first.shape != other.shape or first.dtype != other.dtype:
                return None
            apart = np.abs(first.astype(np.float64) - other.astype(np.float64))
            worst = max(worst, float(apart.max(initial=0)))
    return worst
