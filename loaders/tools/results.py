"""The results of an exact pass, in the order of the records, whatever the number of ranks."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.support.array_types import Array, Ids, as_array
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.samplers import validate

Part = Array
"""What a rank has added: a structured array with the field "id" and a field for each result."""


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
                each id. The rows are copied. bfloat16, which no file can hold, becomes float32.
                Strings of numpy lose zero bytes at their end: give digests as numbers.

        Raises:
            ValueError: a result of another number of rows or of the name `id`, or names or shapes
                that are not those of before.
            IndexError: an id of `n` or above, or below -1.
        """
        ids = validate.as_ids(_array(ids))
        kept = ids != -1
        validate.check_ids(ids[kept], self._n)
        columns = [("id", ids), *((name, _array(results[name])) for name in sorted(results))]
        rows = np.empty(len(ids), [(name, c.dtype, c.shape[1:]) for name, c in columns])
        for name, column in columns:
            if column.shape[:1] != ids.shape:
                raise ValueError(f"{name} needs a row for each of {len(ids)} ids: {column.shape}")
            rows[name] = column
        _joined(part[:1] for part in (*self._added[-1:], rows))
        self._added.append(rows[kept])

    def part(self) -> Part:
        """Return what this rank has added: for each id its results, in a structured array."""
        self._added = [_joined(self._added)]  # without the batches, which would double the memory
        return self._added[0]

    def merged(self, gather: Callable[[Part], Sequence[Part]] | None = None, /) -> dict[str, Array]:
        """Return the whole table: for each result an array with one row per record, in order.

        Args:
            gather: a function that gives the objects of all ranks for the object of this rank. All
                ranks call it. Default: this process has added everything.

        Raises:
            LoaderError: on every rank, records without a result, and records with several.
            ValueError: results of several ranks or batches do not fit together.
        """
        rows = self.part() if gather is None else _joined(gather(self.part()))
        ids, place, times = np.unique(rows["id"], return_index=True, return_counts=True)
        wrong = {
            "no result": self._only[~np.isin(self._only, ids)],
            "too many results": ids[(times > 1) | ~np.isin(ids, self._only)],
        }
        found = [
            f"{len(some):,} have {what} {np.array2string(some, threshold=6, separator=', ')}"
            for what, some in wrong.items()
            if len(some)
        ]
        if found:
            raise LoaderError(
                f"of {validate.counted(len(self._only), 'record')} {' and '.join(found)}",
                advice="add every batch of one ExactOnceBatchSampler pass on each rank",
            )
        places = place[np.searchsorted(ids, self._only)]
        return {name: rows[name][places] for name in rows.dtype.names or () if name != "id"}

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write what this rank has added to a file, for `load`: whole, or not at all."""
        file = io.BytesIO()
        np.savez(file, n=self._n, only=self._only, rows=self.part())
        replace_file(Path(path), file.getvalue())

    @classmethod
    def load(cls, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], /) -> Collect:
        """Return a `Collect` with what all ranks have saved, each in a file.

        Raises:
            LoaderError: a file is damaged, or of other records or results than the first.
        """
        whole: Collect | None = None
        for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
            data = Path(path).read_bytes()
            try:
                with np.load(io.BytesIO(data), allow_pickle=False) as file:
                    n, only, rows = (file[name] for name in ("n", "only", "rows"))
                whole = whole or cls(n, only=only)
                if n != whole._n or not np.array_equal(only, whole._only):
                    raise ValueError("it is of other records than the first")
                whole.add(rows["id"], **{name: rows[name] for name in rows.dtype.names[1:]})
            except Exception as error:  # an error of zip, numpy or this class
                raise LoaderError(f"no results of a Collect: {error}", path=path) from error
        if whole is None:
            raise ValueError("paths must name the file of each rank, got none")
        return whole


def _joined(parts: Iterable[Part]) -> Part:
    """Return parts as one; a rank that had no records knows no results."""
    named = [part for part in parts if len(part)]
    try:
        return np.concatenate(named or [np.zeros(0, [("id", np.int64)])])
    except TypeError as error:
        got = " and ".join(str(part.dtype) for part in named)
        raise ValueError(f"results must have the same names and shapes, got {got}") from error


def _array(value: Any) -> Array:
    """Return a tensor as a numpy array, from any device."""
    array = as_array(value.detach().cpu() if hasattr(value, "detach") else value)
    # Strings of TensorFlow are objects.
    array = np.array(array.tolist()) if array.dtype.hasobject else array
    if array.dtype.hasobject:
        raise TypeError("results must be numbers or strings, got objects")
    return array.astype(np.float32) if array.dtype.isbuiltin == 2 else array  # of ml_dtypes
