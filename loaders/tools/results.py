"""The results of an exact pass, in the order of the records, whatever the number of ranks."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, SupportsIndex

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.feed.collate import Ragged, keeps_integers, ragged_rows
from twinfeed.loaders.loop.numpy_loader import NumpyLoader
from twinfeed.loaders.making.feed import Feed
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Ids, as_array
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.loaders.support.display import html_table
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import open_file
from twinfeed.loaders.tools.backends import of_tensorflow, of_torch
from twinfeed.samplers import validate

Part = Array
"""What a rank has added: a structured array with the field "id" and a field for each result. A
field of objects has the arrays of a ragged result.
"""


class Results:
    """The results of an exact pass, in the order of the records.

    Each rank adds its batches, and one call gives every rank the whole table. Rows come by their
    sample id, never by their position in a batch, so padding, the number of ranks and the order in
    which ranks answer do not matter. A record without a result, or with two, is an error.

    Args:
        of: the feed of the pass. Saved files then name its records and its stream, and `load`
            refuses a file of another run. Or the number of sample ids: `len(index)`, or
            `sampler.num_ids` with views.
        ids: the ids that the pass visits, if not all (int64, in any order), such as `records=` of
            the sampler. The rows then are in the order of `ids`.

    >>> import numpy as np
    >>> ranks = [Results(3), Results(3)]
    >>> ranks[0].add(np.array([0, 2]), score=np.array([0.5, 0.25]))
    >>> ranks[1].add(np.array([1, -1]), score=np.array([0.75, 0.0]))
    >>> ranks[0].gather(lambda part: [rank.part() for rank in ranks])
    {'score': array([0.5 , 0.75, 0.25])}
    """

    def __init__(self, of: Feed | SupportsIndex, /, *, ids: Ids | None = None) -> None:
        if isinstance(of, Feed):
            self._n, self._run = of.sampler.num_ids, NumpyLoader(of).state_dict()
        else:
            self._n, self._run = validate.integer("n", of, minimum=0), {}
        self._ids = checks.check_ids(np.arange(self._n) if ids is None else ids, self._n)
        validate.sorted_distinct("ids", self._ids)
        self._added: list[Part] = []

    def __repr__(self) -> str:
        columns = "".join(f", {name} {kind}" for name, kind in self._columns())
        return f"<Results: {len(self.part()):,} of {len(self._ids):,} records{columns}>"

    def _repr_html_(self) -> str:
        title = f"Results: {len(self.part()):,} of {len(self._ids):,} records"
        return html_table(title, self._columns())

    def _columns(self) -> list[tuple[str, str]]:
        """Return the name of each result that this rank has added, and its dtype as text."""
        rows = self.part()
        return [(name, _dtype_text(rows[name])) for name in rows.dtype.names or () if name != "id"]

    def add(self, ids: Any, /, **results: Any) -> None:
        """Add the results of one batch.

        Args:
            ids: `batch["id"]`, int[batch]; the rows of -1 (padding) are dropped.
            results: by name, an array or a tensor (numpy, torch, TensorFlow, JAX) with one row for
                each id. The rows are copied. bfloat16, which no file can hold, becomes float32.
                Rows of different lengths are a `Ragged`, a ragged tensor, or a list of one array
                for each id, of one dtype and one shape after the first axis.

        Raises:
            ValueError: a result of another number of rows or of the name `id`, names or shapes
                that are not those of before, or a list of values that no one dtype can hold.
            TypeError: a masked array, or objects.
            IndexError: an id of `n` or above, or below -1.
        """
        ids = checks.as_ids(_array("ids", ids))
        real = ids != -1
        checks.check_ids(ids[real], self._n)
        columns = [("id", ids), *((name, _column(name, results[name])) for name in sorted(results))]
        rows = np.empty(len(ids), [(name, c.dtype, c.shape[1:]) for name, c in columns])
        for name, column in columns:
            if column.shape[:1] != ids.shape:
                raise ValueError(f"{name} needs a row for each of {len(ids)} ids: {column.shape}")
            rows[name] = column
        _concatenate(part[:1] for part in (*self._added[-1:], rows))
        self._added.append(rows[real])

    def part(self) -> Part:
        """Return what this rank has added: for each id its results, in a structured array."""
        rows = _concatenate(self._added)
        self._added = [rows]  # without the batches, which would double the memory
        return rows

    def gather(
        self, all_gather: Callable[[Part], Sequence[Part]] | None = None, /
    ) -> dict[str, Any]:
        """Return the whole table: for each result an array with one row per record, in order.

        Rows of different lengths come as a `Ragged`.

        Args:
            all_gather: a function of one object that returns the list of all ranks' objects. All
                ranks call it. Default: this process has added everything.

        Raises:
            LoaderError: on every rank, records without a result, and records with several.
            ValueError: results of several ranks or batches do not fit together, such as names
                beside numbers, or integers that floats would round.
        """
        rows = self.part() if all_gather is None else _concatenate(all_gather(self.part()))
        ids, first_rows, counts = np.unique(rows["id"], return_index=True, return_counts=True)
        wrong = {  # by what is wrong, the ids
            "no result": self._ids[~np.isin(self._ids, ids)],
            "too many results": ids[(counts > 1) | ~np.isin(ids, self._ids)],
        }
        found = [
            f"{len(bad):,} have {what} {np.array2string(bad, threshold=6, separator=', ')}"
            for what, bad in wrong.items()
            if len(bad)
        ]
        if found:
            raise LoaderError(
                f"of {validate.counted(len(self._ids), 'record')} {' and '.join(found)}",
                advice="add every batch of one ExactOnceBatchSampler pass on each rank",
            )
        order = first_rows[np.searchsorted(ids, self._ids)]
        return {
            name: _result_of(rows[name][order]) for name in rows.dtype.names or () if name != "id"
        }

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write what this rank has added to a file, for `load`: whole, or not at all."""
        rows, file = self.part(), io.BytesIO()
        arrays: dict[str, Any] = {"n": self._n, "only": self._ids, "run": json.dumps(self._run)}
        for name in rows.dtype.names or ():
            whole = _result_of(rows[name])
            if isinstance(whole, Ragged):
                whole, arrays[f"lengths {name}"] = whole
            arrays[f"values {name}"] = whole
        np.savez(file, **arrays)
        replace_file(Path(path), file.getvalue())

    @classmethod
    def load(cls, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], /) -> Results:
        """Return a `Results` with what all ranks have saved, each in a file.

        Raises:
            LoaderError: a file is damaged, or of other records, results or another run than the
                first.
        """
        whole: Results | None = None
        for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
            with open_file(path) as file:
                try:
                    n, only, run, results = _read(file)
                    if whole is None:
                        whole = cls(n, ids=only)
                        whole._run = run
                    if n != whole._n or not np.array_equal(only, whole._ids):
                        raise ValueError("it is of other records than the first")
                    if run != whole._run:
                        raise ValueError("it is of another run than the first")
                    whole.add(results.pop("id"), **results)
                except Exception as error:  # an error of zip, numpy or this class
                    raise LoaderError(f"not a file of Results: {error}", path=path) from error
        if whole is None:
            raise ValueError("paths must name the file of each rank, got none")
        return whole


def _read(file: BinaryIO) -> tuple[int, Array, Any, dict[str, Any]]:
    """Read a file that `Results.save` has written.

    Returns:
        The number of sample ids, the ids of the pass, the state of the run, and the results by
        name.

    Raises:
        ValueError: its arrays have more bytes than the file, as in a file made to fill the memory.
    """
    status = os.fstat(file.fileno())
    # A sparse file has fewer blocks on the disk than bytes.
    most = max(LIMITS.record_bytes, LIMITS.inflation * 512 * status.st_blocks)
    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > min(status.st_size, most):
            raise ValueError("its arrays have more bytes than the file")
        file.seek(0)
        with np.load(file, allow_pickle=False) as members:
            arrays = dict(members)
    run = json.loads(arrays["run"].item())
    results: dict[str, Any] = {}
    for key, array in arrays.items():
        name, lengths = key.removeprefix("values "), arrays.get(key.replace("values", "lengths", 1))
        if name != key:
            results[name] = array if lengths is None else Ragged(array, lengths)
    return arrays["n"].item(), arrays["only"], run, results


def _concatenate(parts: Iterable[Part]) -> Part:
    """Join the structured arrays of batches or ranks to one.

    Those without rows are left out, since they may lack results.

    Raises:
        ValueError: names, shapes or dtypes do not fit together.
    """
    named = [part for part in parts if len(part)] or [np.zeros(0, [("id", np.int64)])]
    try:
        whole = np.concatenate(named)
    except TypeError as error:
        got = " and ".join(str(part.dtype) for part in named)
        raise ValueError(f"results must have the same names and shapes, got {got}") from error
    for part, name in product(named, whole.dtype.names or ()):
        if not _holds_values(part[name], whole[name]):
            raise ValueError(
                f"result {name!r} is {_dtype_text(part[name])}, and joined with other batches or "
                f"ranks {_dtype_text(whole[name])}, which cannot hold its values: give all of them "
                "one dtype, and all or none as a Ragged"
            )
    return whole


def _holds_values(old: Array, new: Array) -> bool:
    """Return whether `new`, a column made by joining `old` and others, has the same values.

    numpy would turn numbers into strings, or round large integers to floats.
    """
    if "O" in (old.dtype.kind, new.dtype.kind):
        return _dtype_text(old) == _dtype_text(new)
    if old.dtype.kind in "iu" and new.dtype.kind in "fc":
        return keeps_integers(old, new.dtype)
    return old.dtype.kind == new.dtype.kind or new.dtype.kind in "iufc"


def _dtype_text(column: Array) -> str:
    """Return the dtype of a column as text; for ragged columns also the shape of its arrays."""
    ragged = column.dtype.hasobject
    rows = np.asarray(column[0]) if ragged else column
    dtype = {"S": "byte strings", "U": "text"}.get(rows.dtype.kind, rows.dtype.name)
    return f"ragged {dtype} of shape {('…', *rows.shape[1:])}" if ragged and rows.ndim else dtype


def _result_of(column: Array) -> Array | Ragged:
    """Return a column of a structured array as the user gets it; objects become a `Ragged`."""
    if not column.dtype.hasobject:
        return column
    return Ragged(np.concatenate(column), np.array([len(row) for row in column], np.int64))


def _column(name: str, value: Any) -> Array:
    """Return the user's result of a batch as an array with a row for each id.

    A `Ragged`, a ragged tensor, or a list of arrays becomes an array of objects, which are arrays.

    Raises:
        ValueError: the arrays of a ragged result differ in dtype, or in shape after the first axis.
    """
    if not isinstance(value, (list, tuple)):
        value = of_tensorflow(of_torch(value))
    if isinstance(value, Ragged):
        whole = Ragged(np.array(_array(name, value.values)), _array(name, value.lengths))
        rows = ragged_rows(name, whole)
    elif isinstance(value, (list, tuple)) and any(getattr(row, "ndim", 0) for row in value):
        rows = [np.array(_array(name, row)) for row in value]
    else:
        return _array(name, value)
    column = np.fromiter(rows, object, len(rows))
    kinds = {_dtype_text(column[number:]) for number in range(len(rows))}
    if len(kinds) > 1:
        raise ValueError(f"{name} must have one dtype and shape but for the lengths, got {kinds}")
    return column


def _array(name: str, value: Any) -> Array:
    """Return an array, a tensor on any device, or a list of values as a numpy array.

    Raises:
        TypeError: masked values, or objects that are no numbers or strings.
        ValueError: a list whose values no single dtype can hold.
    """
    items: Any = value if isinstance(value, (list, tuple)) else ()
    if any(isinstance(item, np.ma.MaskedArray) for item in (value, *items)):
        raise TypeError(f"{name} is masked: fill what is masked, or add the mask as a result")
    try:
        array = as_array(value.detach().cpu() if hasattr(value, "detach") else value)
        if array.dtype.hasobject:  # strings of TensorFlow
            items = array.tolist()
            array = np.array(items)
    except ValueError as error:
        problem = f"{name} has rows of several shapes: give a list of an array for each id"
        raise ValueError(problem) from error
    if array.dtype.hasobject:
        raise TypeError(f"{name} must be numbers or strings, got objects")
    # Values of several types in a list, as 1 and "a": numpy would convert some of them.
    for stored, leaf in zip(array.ravel().tolist(), np.array(items, "O").flat, strict=False):
        leaf = leaf.item() if hasattr(leaf, "item") else leaf
        if stored != leaf and leaf == leaf:  # not a NaN
            raise ValueError(f"{name} cannot hold {leaf!r} as {array.dtype}: give one dtype")
    return array.astype(np.float32) if array.dtype.isbuiltin == 2 else array  # of ml_dtypes
