"""Functions and sources that return new arrays, or the same few buffers again and again."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twinfeed.loaders import DatasetSource, Feed, Ragged
from twinfeed.samplers import BatchStream

MOST = 12


class Buffers:
    """Give arrays [n, 2]: new arrays with a `count` of 0, else as many buffers in turn.

    `kind` is "array", "list" or "tensor".
    """

    def __init__(self, count: int, kind: str = "array") -> None:
        self.memory = [np.zeros((MOST, 2)) for _ in range(count)]
        self.lists: list[list[float]] = [[] for _ in range(count)]
        self.kind, self.calls = kind, 0

    def filled(self, values: Sequence[float]) -> Any:
        """Return an array with a row for each value."""
        self.calls += 1
        turn = self.calls % len(self.memory) if self.memory else None
        rows = (np.zeros((MOST, 2)) if turn is None else self.memory[turn])[: len(values)]
        rows[:] = np.reshape(values, (-1, 1))
        if self.kind == "tensor":
            import torch

            return torch.from_numpy(rows)
        return rows

    def row(self, value: float) -> dict[str, Any]:
        """Return a sample of two fields, views of one array, or one list."""
        row = self.filled([value])[0]
        if self.kind != "list":
            return {"x": row[:1], "y": row[1:]}
        out = self.lists[self.calls % len(self.lists)] if self.lists else []
        out[:] = row[:1].tolist()
        return {"x": out, "y": [value]}


class Function(Buffers):
    """A decode or a transform."""

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return self.row(sample["n"])


class OfSeed(Buffers):
    """A transform whose result depends on the seed alone."""

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return self.row(sample["seed32"])


class OfBatch(Buffers):
    """A function of the batch."""

    def __call__(self, batch: Mapping[str, Any], seed: int) -> dict[str, Any]:
        return {"x": self.filled(batch["n"])}


class RaggedOfBatch(Buffers):
    """A function of the batch whose arrays have two lengths."""

    def __call__(self, batch: Mapping[str, Any], seed: int) -> dict[str, Any]:
        return {"x": Ragged(self.filled(batch["n"]), np.ones(len(batch["n"]), int))}


class Items(Buffers):
    """A dataset that gives an item at a time."""

    def __init__(self, length: int, *options: Any) -> None:
        super().__init__(*options)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.row(number)


class Source(Items):
    """A source of its own. Its reader gives its memory, or says so: `fresh`."""

    fields, columns, digests, fresh = ("x",), dict[str, Any](), dict[str, str](), False

    def describe(self, record: int) -> str:
        return f"number {record}"

    def reader(self) -> "Source":
        return self

    def read(self, ids: Any, fields: Any) -> dict[str, Any]:
        return {"x": self.filled(ids)}

    def close(self) -> None:
        pass


class FreshSource(Source):
    """A source that says that nobody else has its arrays."""

    fresh = True


class OneByOne(Source):
    """A source that fills one array of its own in each call for all ids."""

    def read(self, ids: Any, fields: Any) -> dict[str, Any]:
        if not self.memory:
            return super().read(ids, fields)
        scratch, out = np.zeros(2), []
        for number in ids:
            scratch[:] = number
            out.append(scratch)
        return {"x": out}


SOURCES = {"source": Source, "fresh source": FreshSource, "one by one": OneByOne}
FUNCTIONS = {
    "decode": Function,
    "transform": Function,
    "seed": OfSeed,
    "batch_transform": OfBatch,
    "ragged": RaggedOfBatch,
}
ROLES = (*FUNCTIONS, "DatasetSource", *SOURCES)


def feed_of(role: str, sampler: BatchStream, *options: Any) -> Feed:
    """Return a feed whose field `x` holds the number of the record, or its seed."""
    length = sampler.num_records
    if role in SOURCES:
        return Feed(SOURCES[role](length, *options), sampler)
    if role == "DatasetSource":
        return Feed(DatasetSource(Items(length, *options)), sampler)
    names = {"seed": "transform", "ragged": "batch_transform"}
    function = FUNCTIONS[role](*options)
    return Feed(
        DatasetSource({"n": np.arange(length)}), sampler, **{names.get(role, role): function}
    )


def check_rows(role: str, batches: Sequence[Mapping[str, Any]], feed: Feed) -> None:
    """Assert that kept batches hold the rows of their records."""
    for step, batch in enumerate(batches):
        rows = batch["x"].values if role == "ragged" else batch["x"]
        wanted = feed.sampler.records(np.asarray(batch["id"]))
        if role == "seed":
            wanted = feed.sampler.seeds(0, step) & np.uint64((1 << 32) - 1)
        found = np.asarray(rows).reshape(len(wanted), -1)[:, 0]
        assert np.array_equal(found, wanted), (role, step, found, wanted)
