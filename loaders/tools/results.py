"""The results of an exact pass, in the order of the records, whatever the number of ranks."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, SupportsIndex

import numpy as np

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.feed.collate import Ragged, ragged_rows
from twinfeed.loaders.loop.numpy_loader import NumpyLoader
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Ids, as_array
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.loaders.support.display import html_table
from twinfeed.loaders.support.regular import open_file
from twinfeed.loaders.tools.backends import to_ragged
from twinfeed.samplers import validate

Part = Array
"""The rows that a rank has added: a structured array with the field "id" and a field for each
result. A field of objects has the arrays of a ragged result.
"""


_ADVICE = "give all ranks one name of this evaluation, such as Results(feed, run='epoch 7')"


class Results:
    """The results of an exact pass, in the order of the records.

    Each rank adds its batches, and one call gives every rank the whole table. Rows come by their
    sample id, never by their position in a batch, so padding, the number of ranks and the order in
    which ranks answer do not matter. A record without a result, or with two, is an error.

    Args:
        of: the feed of the pass. Saved files then name its records and its stream, and `load`
            refuses a file of others. Or the number of sample ids: `len(index)`, or
            `sampler.num_ids` with views.
        ids: the ids that the pass visits, if not all (int64, in any order), such as `records=` of
            the sampler. The rows then are in the order of `ids`.
        run: the name of this evaluation, the same on all ranks, and another for each evaluation,
            such as "run 7, epoch 3". Saved files have it, and `load` joins files of one name only.

    >>> import numpy as np
    >>> ranks = [Results(3), Results(3)]
    >>> ranks[0].add(np.array([0, 2]), score=np.array([0.5, 0.25]))
    >>> ranks[1].add(np.array([1, -1]), score=np.array([0.75, 0.0]))
    >>> ranks[0].gather(lambda part: [rank.part() for rank in ranks])
    {'score': array([0.5 , 0.75, 0.25])}
    """

    def __init__(
        self, of: Feed | SupportsIndex, /, *, ids: Ids | None = None, run: object = None
    ) -> None:
        name = "" if run is None else str(run)  # an empty text, as of an unset variable, is none
        self._run: dict[str, Any] = {"run": name or None}
        if isinstance(of, Feed):
            self._num_ids = of.sampler.num_ids
            self._run["feed"] = NumpyLoader(of).state_dict()
        else:
            self._num_ids = validate.integer("n, if not a feed,", of, minimum=0)
        ids = np.arange(self._num_ids) if ids is None else ids
        self._ids = checks.check_ids(ids, self._num_ids)
        validate.sorted_distinct("ids", self._ids)
        self._added: list[Part] = []

    def __repr__(self) -> str:
        columns = ", ".join(("", *_names(self.part())))
        return f"<Results: {len(self.part()):,} of {len(self._ids):,} records{columns}>"

    def _repr_html_(self) -> str:
        title = f"Results: {len(self.part()):,} of {len(self._ids):,} records"
        return html_table(
            title, [(name, str(self.part().dtype[name])) for name in _names(self.part())]
        )

    def add(self, ids: Any, /, **results: Any) -> None:
        """Add the results of one batch.

        Args:
            ids: `batch["id"]`, int[batch]; the rows of -1 (padding) are dropped.
            results: the results by name. Each is an array or a tensor (numpy, torch, TensorFlow,
                JAX) with a row for each id. The rows are copied. bfloat16, which no file can hold,
                becomes float32. If the rows differ in length, the result is a `Ragged`, a ragged
                or nested tensor, or a list that has an array for each id.

        Raises:
            ValueError: a result does not have a row for each id, or has another shape or kind of
                values than in the last batch.
            TypeError: objects, masked values, or other names than in the last batch.
            IndexError: an id below -1, or one that is not below the number of sample ids.
        """
        ids = checks.as_ids(_as_plain_array("ids", ids))
        real = ids != -1
        checks.check_ids(ids[real], self._num_ids)
        columns = [(name, _as_column(name, results[name])) for name in sorted(results)]
        for name, column in columns:
            if column.shape[:1] != ids.shape:
                raise ValueError(f"{name} needs a row for each of {len(ids)} ids: {column.shape}")
        columns = [("id", ids), *columns]
        rows = np.empty(len(ids), [(name, c.dtype, c.shape[1:]) for name, c in columns])
        for name, column in columns:
            rows[name] = column
        # Called only because it raises an error if this batch does not fit the last one, which the
        # user should see now, and not in `gather`. The first row of each batch is enough.
        _concatenate(batch[:1] for batch in (*self._added[-1:], rows))
        self._added.append(rows[real])

    def part(self) -> Part:
        """Return what this rank has added: for each id its results, in a structured array."""
        rows = _concatenate(self._added)
        self._added = [rows]  # without the batches, which would double the memory
        return rows

    def gather(
        self, all_gather: Callable[[Part], Sequence[Part]] | None = None, /
    ) -> dict[str, Any]:
        """Return the whole table: for each result, an array with a row for each id, in order.

        The ids are the sample ids of the pass: of records, or of views of records. Rows of
        different lengths come as a `Ragged`.

        Args:
            all_gather: the user's collective function, which every rank calls with its own object:
                it returns the list of the objects of all ranks. Default: there is one rank, and
                this process has added everything.

        Raises:
            LoaderError: some ids of the pass have no result, or several. Every rank raises it.
            ValueError: results of several ranks or batches differ in their kind of values or shape.
            TypeError: they differ in name.
        """
        parts = [self.part()] if all_gather is None else [*all_gather(self.part())]
        rows = _concatenate(parts)
        ids, first_rows, counts = np.unique(rows["id"], return_index=True, return_counts=True)
        wrong_ids = {
            "no result": self._ids[~np.isin(self._ids, ids)],
            "too many results": ids[(counts > 1) | ~np.isin(ids, self._ids)],
        }
        problems = [
            f"{len(wrong):,} have {what} {np.array2string(wrong, threshold=6, separator=', ')}"
            for what, wrong in wrong_ids.items()
            if len(wrong)
        ]
        if problems:
            raise LoaderError(
                f"of {validate.counted(len(self._ids), 'record')} {' and '.join(problems)}",
                advice="add every batch of one ExactOnceBatchSampler pass on each rank",
            )
        order = first_rows[np.searchsorted(ids, self._ids)]  # the row of each id, in their order
        return {name: _result_of(rows[name][order]) for name in _names(rows)}

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write the results that this rank has added to a file, for `load`.

        The file is a .npz, an archive of arrays by name:

        - "n": the number of sample ids;
        - "only": the sample ids that the pass visits;
        - "run": the name of the run and the state of the loader as JSON, which identify the run;
        - "values score": the values of a result with the name "score";
        - "lengths score": the lengths of its rows, if they differ.

        The file is written completely or not at all. It replaces a file of an earlier `save`.

        Raises:
            FileExistsError: something else exists at the path, even a link to such a file.
        """
        # `part` returns the rows that this rank has added: an array with a column for each result.
        rows, file, run = self.part(), io.BytesIO(), json.dumps(self._run)
        arrays: dict[str, Any] = {"n": self._num_ids, "only": self._ids, "run": run}
        for name in rows.dtype.names or ():  # "id" too
            result = _result_of(rows[name])
            if isinstance(result, Ragged):
                arrays[f"lengths {name}"] = result.lengths
                result = result.values
            arrays[f"values {name}"] = result
        np.savez(file, **arrays)
        replace_file(Path(path), file.getvalue(), "a file of Results", _is_saved)

    @classmethod
    def load(cls, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], /) -> Results:
        """Return a `Results` with the results that all ranks have saved, each rank in a file.

        Raises:
            LoaderError: a file is damaged; its records, results or run differ from those of the
                first file; or there are several files, without the name of a run.
        """
        joined: Results | None = None
        for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
            with open_file(path) as file:
                try:
                    num_ids, ids, run, results = _read(file)
                    if joined is None:
                        joined = cls(num_ids, ids=ids)
                        joined._run = run
                    elif num_ids != joined._num_ids or not np.array_equal(ids, joined._ids):
                        raise ValueError("its records are not those of the first file")
                    elif run != joined._run or run["run"] is None:
                        raise ValueError(f"its run is not known to be that of the first: {_ADVICE}")
                    joined.add(results.pop("id"), **results)
                except Exception as error:  # an error of zip, numpy or this class
                    raise LoaderError(f"not a file of these Results: {error}", path=path) from error
        if joined is None:
            raise ValueError("paths must name the file of each rank, got none")
        return joined


def _is_saved(file: BinaryIO) -> bool:
    """Return whether a file has the arrays that `Results.save` writes."""
    return {"n.npy", "only.npy", "run.npy"} <= {*zipfile.ZipFile(file).namelist()}


def _read(file: BinaryIO) -> tuple[int, Array, Any, dict[str, Any]]:
    """Return the number of sample ids, the ids of the pass, the run and the results of a file."""
    with np.load(file, allow_pickle=False) as members:
        arrays = dict(members)
    run = json.loads(arrays["run"].item())
    results: dict[str, Any] = {}
    for name in [key.removeprefix("values ") for key in arrays if key.startswith("values ")]:
        values, lengths = arrays[f"values {name}"], arrays.get(f"lengths {name}")
        results[name] = values if lengths is None else Ragged(values, lengths)
    return arrays["n"].item(), arrays["only"], run, results


def _concatenate(parts: Iterable[Part]) -> Part:
    """Join the rows of several batches or ranks."""
    nonempty = [part for part in parts if len(part)] or [np.zeros(0, [("id", np.int64)])]
    rows = np.concatenate(nonempty)
    for name in _names(rows):
        _check_kinds(part[name] for part in nonempty)
    return rows


def _names(part: Part) -> list[str]:
    """Return the names of the results."""
    return [name for name in part.dtype.names or () if name != "id"]


def _check_kinds(arrays: Iterable[Array]) -> None:
    """Refuse arrays of several kinds, such as integers and floats, which numpy would convert."""
    kinds = {array.dtype.kind: array.dtype for array in arrays}
    if len(kinds) > 1:
        text = " and ".join(map(str, kinds.values()))
        raise ValueError(f"a result must have one kind of values, got {text}: convert it for `add`")


def _result_of(column: Array) -> Array | Ragged:
    """Return a column of a structured array as the user gets it; objects become a `Ragged`."""
    if not column.dtype.hasobject:
        return column
    _check_kinds(column)
    return Ragged(np.concatenate(column), np.array([len(row) for row in column], np.int64))


def _as_column(name: str, value: Any) -> Array:
    """Return a result as an array with a row for each id; ragged rows are objects, all arrays."""
    if not isinstance(value, (list, tuple)):
        value = to_ragged(value)  # a ragged tensor becomes a `Ragged` or a list; other values stay
    if isinstance(value, Ragged):
        # For example, the values [1, 2, 3] and the lengths [2, 1] become the rows [1, 2] and [3].
        value = ragged_rows(name, Ragged(*(_as_plain_array(name, part) for part in value)))
    elif not isinstance(value, (list, tuple)) or not any(getattr(r, "ndim", 0) for r in value):
        return _as_plain_array(name, value)
    rows = [np.array(_as_plain_array(name, row)) for row in value]
    return np.fromiter(rows, object, len(rows))  # np.array would stack rows of equal length


def _check_unchanged(name: str, values: Sequence[Any], array: Array) -> None:
    """Refuse a list whose values no dtype holds together: of [1, "a"], numpy makes strings."""
    items = zip(np.array(values, object).ravel(), array.ravel().tolist(), strict=False)
    for old, new in items:
        if not (old == new or (old != old and new != new)):  # NaN stays NaN
            raise ValueError(f"{name} must be values of one kind, got {old!r}, read as {new!r}")


def _as_plain_array(name: str, value: Any) -> Array:
    """Return an array, a tensor on any device, or a list of values as a numpy array."""
    array = as_array(value.detach().cpu() if hasattr(value, "detach") else value)
    values = value
    if array.dtype.hasobject:  # as TensorFlow has for strings
        values = array.tolist()
        array = as_array(values)
    if isinstance(values, (list, tuple)):
        _check_unchanged(name, values, array)
    if array.dtype.hasobject or isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be numbers or strings, got objects or masked values")
    # numpy's code 2 means a dtype of another package, such as bfloat16 of ml_dtypes, which
    # cannot be saved to a file.
    return array.astype(np.float32) if array.dtype.isbuiltin == 2 else array
