"""The results of an exact pass, in the order of the records, whatever the number of ranks."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.support.array_types import Array, Ids, Int64s, as_array
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.samplers import validate

Part = tuple[Int64s, dict[str, Array]]
"""The ids that a rank has added, and the rows of each result for these ids."""


class Collect:
    """Put the results of an exact pass into the order of the records.

    Each rank adds its batches, and one call gives every rank the whole table. Rows come by their
    sample id, never by their position in a batch, so padding, the number of ranks and the order in
    which ranks answer do not matter. A record without a result, or with two, is an error.

    Args:
        n: the number of sample ids: `len(index)`, or `sampler.num_ids` with views.
        only: the ids that the pass visits, if not all (int64, in any order), such as `records=` of
            the sampler. The rows then are in the order of `only`.

    >>> import numpy as np
    >>> ranks = [Collect(3), Collect(3)]
    >>> ranks[0].add(np.array([0, 2]), score=np.array([0.5, 0.25]))
    >>> ranks[1].add(np.array([1, -1]), score=np.array([0.75, 0.0]))
    >>> ranks[0].merged(lambda part: [rank.part() for rank in ranks])
    {'score': array([0.5 , 0.75, 0.25])}
    """

    def __init__(self, n: SupportsIndex, /, *, only: Ids | None = None) -> None:
        self._n = validate.integer("n", n, minimum=0)
        self._only = validate.check_ids(np.arange(self._n) if only is None else only, self._n)
        validate.distinct("only", self._only)
        self._added: list[Part] = []

    def add(self, ids: Any, /, **results: Any) -> None:
        """Add the results of one batch.

        Args:
            ids: `batch["id"]`, int[batch]; the rows of -1 (padding) are dropped.
            results: by name, an array or a tensor (numpy, torch, TensorFlow, JAX) with one row for
                each id. The rows are copied.

        Raises:
            ValueError: a result has another number of rows, or the names are not those of before.
            IndexError: an id of `n` or above, or below -1.
        """
        numbers = validate.as_ids(_array(ids))
        kept = numbers != -1
        rows = {name: _array(result) for name, result in results.items()}
        for name, array in rows.items():
            if array.shape[:1] != numbers.shape:
                raise ValueError(
                    f"{name} must have a row for each of {validate.counted(len(numbers), 'id')}, "
                    f"got the shape {array.shape}"
                )
        if self._added and rows.keys() != self._added[0][1].keys():
            raise ValueError(f"results must be {[*self._added[0][1]]} as before, got {[*rows]}")
        numbers = validate.check_ids(numbers[kept], self._n)
        self._added.append((numbers, {name: array[kept] for name, array in rows.items()}))

    def part(self) -> Part:
        """Return what this rank has added: the ids, and the rows of each result."""
        names = self._added[0][1] if self._added else ()
        ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in self._added)])
        return ids, {
            name: np.concatenate([rows[name] for _, rows in self._added]) for name in names
        }

    def merged(self, gather: Callable[[Part], Sequence[Part]] | None = None, /) -> dict[str, Array]:
        """Return the whole table: for each result an array with one row per record, in order.

        Args:
            gather: a function that gives the objects of all ranks for the object of this rank. All
                ranks call it. Default: this process has added everything.

        Raises:
            LoaderError: on every rank, records without a result, and records with several.
            ValueError: results of several ranks or batches do not fit together.
        """
        parts = self._added if gather is None else list(gather(self.part()))
        only = self._only
        ids = np.concatenate([only[:0], *(ids for ids, _ in parts)])
        places = self._places(ids)
        table = {}
        filled = [(ids, rows) for ids, rows in parts if rows or len(ids)]
        names = {tuple(sorted(rows)) for _, rows in filled}
        if len(names) > 1:
            raise ValueError(f"ranks have added results of different names: {sorted(names)}")
        ends = np.cumsum([len(ids) for ids, _ in filled])[:-1]
        for name in filled[0][1] if filled else ():
            arrays = [rows[name] for _, rows in filled]
            shape = (len(only), *arrays[0].shape[1:])
            table[name] = np.empty(shape, np.result_type(*arrays))
            for rows, array in zip(np.split(places, ends), arrays, strict=True):
                if array.shape[1:] != shape[1:]:
                    raise ValueError(
                        f"rows of {name!r} have the shapes {shape[1:]} and {array.shape[1:]}"
                    )
                table[name][rows] = array
        return table

    def _places(self, added: Int64s) -> Int64s:
        """Return the row of each id in the table.

        Raises:
            LoaderError: records without a result, with several results, or not in `only`.
        """
        order = np.argsort(self._only)
        if np.array_equal(np.sort(added), self._only[order]):
            places: Int64s = order[np.searchsorted(self._only, added, sorter=order)]
            return places
        ids, times = np.unique(added, return_counts=True)
        unknown = np.setdiff1d(ids, self._only, assume_unique=True)
        found = []
        for what, wrong in (
            ("no result", np.setdiff1d(self._only, ids, assume_unique=True)),
            ("too many results", np.union1d(ids[times > 1], unknown)),
        ):
            if len(wrong):
                some = ", ".join(map(str, wrong[:5])) + ", …" * (len(wrong) > 5)
                found.append(f"{len(wrong):,} have {what} ({some})")
        raise LoaderError(
            f"of {validate.counted(len(self._only), 'record')} {' and '.join(found)}",
            advice="on each rank add every batch of one whole pass of an "
            "ExactOnceBatchSampler, and give merged the function that gathers all parts",
        )

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write what this rank has added to a file, for `load`: whole, or not at all."""
        ids, rows = self.part()
        file = io.BytesIO()
        named: dict[str, Any] = {f"result {name}": array for name, array in rows.items()}
        np.savez(file, n=self._n, only=self._only, ids=ids, **named)
        replace_file(Path(path), file.getvalue())

    @classmethod
    def load(cls, paths: Iterable[str | os.PathLike[str]], /) -> Collect:
        """Return a `Collect` with what all ranks have saved.

        Raises:
            LoaderError: a file is damaged, or of other records than the first.
        """
        collect: Collect | None = None
        for path in paths:
            data = Path(path).read_bytes()
            try:
                with np.load(io.BytesIO(data), allow_pickle=False) as file:
                    arrays = dict(file)
                own = cls(arrays.pop("n"), only=arrays.pop("only"))
                own.add(arrays.pop("ids"), **{name[7:]: rows for name, rows in arrays.items()})
            except Exception as error:  # an error of zip, numpy or this class
                raise LoaderError(f"no results of a Collect: {error}", path=path) from error
            collect = collect or cls(own._n, only=own._only)
            if own._n != collect._n or not np.array_equal(own._only, collect._only):
                raise LoaderError("the results are of other records than the first", path=path)
            collect._added += own._added
        if collect is None:
            raise ValueError("paths must name the file of each rank, got none")
        return collect


def _array(value: Any) -> Array:
    """Return a tensor as a numpy array, from any device."""
    array = as_array(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.dtype.hasobject:
        raise TypeError("results must be numbers or strings, got objects")
    return array
