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
                    f"{name} must have a row for each of the {len(numbers)} ids, got {array.shape}"
                )
        ids = validate.check_ids(numbers[kept], self._n)
        part = ids, {name: array[kept] for name, array in rows.items()}
        _names([part, *self._added[-1:]])
        self._added.append(part)

    def part(self) -> Part:
        """Return what this rank has added: the ids, and the rows of each result."""
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
        ids, rows = self.part() if gather is None else _joined(gather(self.part()))
        places = self._places(ids)
        return {name: array[places] for name, array in rows.items()}

    def _places(self, added: Int64s) -> Int64s:
        """Return the place of each record of the table among the added ids.

        Raises:
            LoaderError: records without a result, with several results, or not in `only`.
        """
        order = np.argsort(added)
        first = np.searchsorted(added, self._only, "left", order)
        times = np.searchsorted(added, self._only, "right", order) - first
        unknown = np.unique(added[~np.isin(added, self._only)])
        found = []
        for what, wrong in (
            ("no result", self._only[times == 0]),
            ("too many results", np.append(self._only[times > 1], unknown)),
        ):
            if len(wrong):
                some = ", ".join(map(str, wrong[:5])) + ", …" * (len(wrong) > 5)
                found.append(f"{len(wrong):,} have {what} ({some})")
        if found:
            raise LoaderError(
                f"of {validate.counted(len(self._only), 'record')} {' and '.join(found)}",
                advice="on each rank add every batch of one whole pass of an "
                "ExactOnceBatchSampler, and give merged the function that gathers all parts",
            )
        return order[first]

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write what this rank has added to a file, for `load`: whole, or not at all."""
        ids, rows = self.part()
        file = io.BytesIO()
        named: dict[str, Any] = {f"result {name}": array for name, array in rows.items()}
        np.savez(file, n=self._n, only=self._only, ids=ids, **named)
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
                    arrays = dict(file)
                n, only, ids = (arrays.pop(name) for name in ("n", "only", "ids"))
                whole = whole or cls(n, only=only)
                if n != whole._n or not np.array_equal(only, whole._only):
                    raise ValueError("it is of other records than the first")
                whole.add(ids, **{name[7:]: rows for name, rows in arrays.items()})
            except Exception as error:  # an error of zip, numpy or this class
                raise LoaderError(f"no results of a Collect: {error}", path=path) from error
        if whole is None:
            raise ValueError("paths must name the file of each rank, got none")
        return whole


def _joined(parts: Iterable[Part]) -> Part:
    """Return parts as one; a part without ids and results is of a rank that had no batches."""
    filled = [(ids, rows) for ids, rows in parts if rows or len(ids)]
    ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in filled)])
    names = _names(filled)
    return ids, {name: np.concatenate([rows[name] for _, rows in filled]) for name in names}


def _names(parts: Iterable[Part]) -> list[str]:
    """Return the names of results; ValueError unless all have the same names and shapes."""
    shapes = {
        str({name: array.shape[1:] for name, array in sorted(rows.items())}): [*rows]
        for ids, rows in parts
        if rows or len(ids)
    }
    if len(shapes) > 1:
        raise ValueError(f"results must have the same names and shapes, got {' and '.join(shapes)}")
    return next(iter(shapes.values()), [])


def _array(value: Any) -> Array:
    """Return a tensor as a numpy array, from any device."""
    array = as_array(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.dtype.hasobject:
        raise TypeError("results must be numbers or strings, got objects")
    return array
