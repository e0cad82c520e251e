"""Read a pass of anything that gives ids, or batches of ids, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from twinfeed.samplers.types import Int64s

_MOST_EMPTY = 1000  # empty batches in a row that are drawn
_FIRST_CHUNK, _LARGEST_CHUNK = 64, 65_536  # items that are drawn before they become arrays


class StoppedError(Exception):
    """The sampler did something in place of an answer; the text says what, as a phrase."""


class NotAskedError(Exception):
    """A question cannot be asked; the text says why, as a phrase."""


def phrase(error: BaseException) -> str:
    """Return the type and the text of an error, in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


@dataclass(frozen=True)
class Pass:
    """The ids of a pass, and the sizes of its batches; `sizes` is None if single ids came.

    `ended` is False if the pass went on after as many ids as were wanted. `length` is what `len`
    said before the pass, or the error that it raised.
    """

    ids: Int64s
    sizes: Int64s | None
    ended: bool = True
    length: int | str | None = None

    def __len__(self) -> int:
        return len(self.ids if self.sizes is None else self.sizes)

    def after(self, items: int) -> Int64s:
        """Return the ids after the first items: ids, or batches."""
        return self.ids[items if self.sizes is None else int(self.sizes[:items].sum()) :]

    def window(self, first: int, stop: int) -> Pass:
        """Return the items that start at the ids from `first` to `stop`, as a pass."""
        if self.sizes is None:
            return Pass(self.ids[first:stop], None, length=self.length)
        starts = np.cumsum(self.sizes) - self.sizes
        inside = (starts >= first) & (starts < stop)
        return Pass(self.ids[np.repeat(inside, self.sizes)], self.sizes[inside], length=self.length)


@dataclass
class PassReader:
    """Draws passes: at least `most` ids of an endless one. `ids` finds the ids in an item."""

    ids: Callable[[Any], Any] | None
    most: int
    count: int = 0  # items that came, if a pass is interrupted
    _chunk: list[Any] = field(default_factory=list, init=False)

    @property
    def progress(self) -> int:
        """The number of items that came so far."""
        return self.count + len(self._chunk)

    def read(self, items: Iterable[Any], length: int | str | None = None) -> Pass:
        """Draw a pass, up to its end, or to `most` ids, and to twice its `length`."""
        iterator, ids = iter(items), [np.empty(0, np.int64)]
        sizes: list[Int64s] = []
        self.count, total, empty, size = 0, 0, 0, _FIRST_CHUNK
        least_items = 2 * length if isinstance(length, int) else 0
        while total < self.most or self.count < least_items:
            self._chunk.clear()
            self._chunk.extend(islice(iterator, size))  # if it raises, what came is counted
            if not self._chunk:
                break
            chunk_ids, chunk_sizes = self._arrays(bool(sizes) if self.count else None)
            ids.append(chunk_ids)
            total += len(chunk_ids)
            if chunk_sizes is not None:
                sizes.append(chunk_sizes)
            empty = 0 if len(chunk_ids) else empty + len(self._chunk)
            if empty >= _MOST_EMPTY:
                raise StoppedError(f"{empty:,} empty batches came in a row")
            self.count += len(self._chunk)
            size = min(2 * size, _LARGEST_CHUNK)
        all_sizes = np.concatenate(sizes) if sizes else None
        ended = not self._chunk
        self._chunk.clear()
        return Pass(np.concatenate(ids), all_sizes, ended, length)

    def _arrays(self, are_batches: bool | None) -> tuple[Int64s, Int64s | None]:
        """Return the ids of a chunk of items, and the sizes of its batches.

        `are_batches` says what the items before were; None if there were none.
        """
        if self.ids is None and not are_batches and set(map(type, self._chunk)) == {int}:
            try:
                return np.array(self._chunk, np.int64), None
            except OverflowError:
                raise StoppedError("an item has no ids: an integer of more than 64 bits") from None
        arrays = [ids_of(item if self.ids is None else self.ids(item)) for item in self._chunk]
        if are_batches is None:
            are_batches = arrays[0].ndim > 0
        for position, array in enumerate(arrays, start=self.count):
            if (array.ndim > 0) != are_batches:
                kind, before = "a batch", "single ids"
                if are_batches:
                    kind, before = "one id", "batches"
                raise StoppedError(f"item {position} is {kind}, and those before are {before}")
        sizes = np.array([array.size for array in arrays]) if are_batches else None
        return np.concatenate([array.reshape(-1) for array in arrays]), sizes


def ids_of(item: Any) -> Int64s:
    """Return an id, or the ids of a batch, however it is nested, as an array."""
    if isinstance(item, (list, tuple)) and any(_is_nested(part) for part in item):
        return np.concatenate([ids_of(part).reshape(-1) for part in item])
    try:
        array = np.asarray(item.numpy() if hasattr(item, "numpy") else item)
    except Exception as error:
        raise StoppedError(f"an item has no ids: {phrase(error)}") from None
    if array.dtype.kind not in "iu" and (array.size or array.dtype.kind != "f"):
        raise StoppedError(
            f"an item has no ids: {type(item).__name__} {str(item)[:40]}; pass ids=, a function "
            "that takes an item and returns its ids"
        )
    return array.astype(np.int64)


def _is_nested(part: Any) -> bool:
    return not isinstance(part, str) and (hasattr(part, "__len__") or hasattr(part, "numpy"))
