"""The results of an exact pass, in the order of the records, whatever the number of ranks."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, SupportsIndex

import numpy as np

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.feed.collate import Ragged, keeps_integers, ragged_rows
from twinfeed.loaders.loop.numpy_loader import NumpyLoader
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Ids, as_array
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.loaders.support.display import html_table
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import open_file
from twinfeed.loaders.tools.backends import to_ragged
from twinfeed.samplers import validate

Part = Array
"""The rows that a rank has added: a structured array with the field "id" and a field for each
result. A field of objects has the arrays of a ragged result.
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
            self._num_ids, self._run = of.sampler.num_ids, NumpyLoader(of).state_dict()
        else:
            if not isinstance(of, SupportsIndex):
                raise TypeError(f"Results takes a feed or len(index), got a {type(of).__name__}")
            self._num_ids, self._run = validate.integer("n", of, minimum=0), {}
        self._ids = checks.check_ids(
            np.arange(self._num_ids) if ids is None else ids, self._num_ids
        )
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
            results: the results by name. Each is an array or a tensor (numpy, torch, TensorFlow,
                JAX) with a row for each id. The rows are copied. bfloat16, which no file can hold,
                becomes float32. If the rows differ in length, the result is a `Ragged`, a ragged
                tensor, or a list that has an array for each id. These arrays must have the same
                dtype, and the same shape after the first axis.

        Raises:
            ValueError: a result does not have a row for each id, or its name is `id`; names, shapes
                or dtypes do not fit those of the last batch; or no dtype can hold all values of a
                list.
            TypeError: a masked array, or objects.
            IndexError: an id below -1, or one that is not below the number of sample ids.
        """
        if isinstance(ids, Mapping):
            raise TypeError("ids must be ids, got a dict: write add(batch['id'], score=scores)")
        ids = checks.as_ids(_as_plain_array("ids", ids))
        real = ids != -1
        checks.check_ids(ids[real], self._num_ids)
        columns = [
            ("id", ids),
            *((name, _as_column(name, results[name])) for name in sorted(results)),
        ]
        rows = np.empty(len(ids), [(name, c.dtype, c.shape[1:]) for name, c in columns])
        for name, column in columns:
            if column.shape[:1] != ids.shape:
                raise ValueError(f"{name} needs a row for each of {len(ids)} ids: {column.shape}")
            rows[name] = column
        # Called only because it raises ValueError if this batch does not fit the last one, which
        # the user should see now, and not in `gather`. The first row of each batch is enough.
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
            TypeError: `all_gather` is not a function, or returns something else.
            LoaderError: some ids of the pass have no result, or several. Every rank raises it.
            ValueError: results of several ranks or batches do not fit together, such as strings and
                numbers, or integers that floats would round.
        """
        rows = self.part() if all_gather is None else _gather(self.part(), all_gather)
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
        return {
            name: _result_of(rows[name][order]) for name in rows.dtype.names or () if name != "id"
        }

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write the results that this rank has added to a file, for `load`.

        The file is a .npz, an archive of arrays by name:

        - "n": the number of sample ids;
        - "only": the sample ids that the pass visits;
        - "run": the state of the loader as JSON, which identifies the run;
        - "values score": the values of a result with the name "score";
        - "lengths score": the lengths of its rows, if they differ.

        The file is written completely or not at all.
        """
        # `part` returns the rows that this rank has added: an array with a column for each result.
        rows, file, run = self.part(), io.BytesIO(), json.dumps(self._run)
        arrays: dict[str, Any] = {"n": self._num_ids, "only": self._ids, "run": run}
        for name in rows.dtype.names or ():
            result = _result_of(rows[name])
            if isinstance(result, Ragged):
                arrays[f"lengths {name}"] = result.lengths
                result = result.values
            arrays[f"values {name}"] = result
        np.savez(file, **arrays)
        replace_file(Path(path), file.getvalue())

    @classmethod
    def load(cls, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], /) -> Results:
        """Return a `Results` with the results that all ranks have saved, each rank in a file.

        Raises:
            LoaderError: a file is damaged, or its records, results or run differ from those of the
                first file.
        """
        joined: Results | None = None
        for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
            with open_file(path) as file:
                try:
                    num_ids, ids, run, results = _read(file)
                    if joined is None:
                        joined = cls(num_ids, ids=ids)
                        joined._run = run
                    if num_ids != joined._num_ids or not np.array_equal(ids, joined._ids):
                        raise ValueError("its records are not those of the first file")
                    if run != joined._run:
                        raise ValueError("its run is not that of the first file")
                    joined.add(results.pop("id"), **results)
                except Exception as error:  # an error of zip, numpy or this class
                    raise LoaderError(f"not a file of Results: {error}", path=path) from error
        if joined is None:
            raise ValueError("paths must name the file of each rank, got none")
        return joined


def _read(file: BinaryIO) -> tuple[int, Array, Any, dict[str, Any]]:
    """Read a .npz file that `Results.save` has written.

    The file has these arrays: "n" is the number of sample ids, "only" has the sample ids that the
    pass visits, "run" is the state of the loader as JSON, "values score" has the values of a result
    named "score", and "lengths score" the lengths of its rows, if they differ.

    Returns:
        The number of sample ids, the ids of the pass, the state, and the results by name.

    Raises:
        ValueError: the arrays would take more bytes than the file has. `save` does not compress
            them, so somebody else made the file, to fill the memory.
    """
    status = os.fstat(file.fileno())
    # A sparse file may be long, but take few blocks on the disk: its holes are read as zeros. So
    # allow at most `LIMITS.inflation` (1024) bytes in memory for each byte on the disk. `st_blocks`
    # counts blocks of 512 bytes.
    max_bytes = max(LIMITS.record_bytes, LIMITS.inflation * 512 * status.st_blocks)
    with zipfile.ZipFile(file) as archive:
        array_bytes = sum(member.file_size for member in archive.infolist())
        if array_bytes > min(status.st_size, max_bytes):
            raise ValueError("its arrays have more bytes than the file")
        file.seek(0)
        with np.load(file, allow_pickle=False) as members:
            arrays = dict(members)
    run = json.loads(arrays["run"].item())
    results: dict[str, Any] = {}
    for name in [key.removeprefix("values ") for key in arrays if key.startswith("values ")]:
        values, lengths = arrays[f"values {name}"], arrays.get(f"lengths {name}")
        results[name] = values if lengths is None else Ragged(values, lengths)
    return arrays["n"].item(), arrays["only"], run, results


def _gather(part: Part, all_gather: Callable[[Part], Sequence[Part]]) -> Part:
    """Return the rows of all ranks; raise TypeError if `all_gather` does not return their parts."""
    if not callable(all_gather):
        raise TypeError(f"all_gather must be a function, got {all_gather!r:.80}")
    parts = all_gather(part)
    if not isinstance(parts, Sequence) or not all(isinstance(p, np.ndarray) for p in parts):
        raise TypeError(f"all_gather must return the list of all ranks' parts, got {parts!r:.80}")
    return _concatenate(parts)


def _concatenate(parts: Iterable[Part]) -> Part:
    """Join the structured arrays of several batches or ranks to one.

    An array without rows is left out: a rank without batches has no names of results.

    Raises:
        ValueError: names, shapes or dtypes do not fit together.
    """
    nonempty = [part for part in parts if len(part)] or [np.zeros(0, [("id", np.int64)])]
    try:
        joined = np.concatenate(nonempty)
    except TypeError as error:
        dtypes = " and ".join(str(part.dtype) for part in nonempty)
        raise ValueError(f"results must have the same names and shapes, got {dtypes}") from error
    for part, name in product(nonempty, joined.dtype.names or ()):
        if not _keeps_values(part[name], joined[name]):
            raise ValueError(
                f"result {name!r} is {_dtype_text(part[name])}, but with other batches it is "
                f"{_dtype_text(joined[name])}, which cannot hold its values: add all with one dtype"
            )
    return joined


def _keeps_values(column: Array, joined: Array) -> bool:
    """Return whether the values of a column are unchanged in `joined`.

    `joined` is what numpy has concatenated of this and other columns. If their dtypes differ, numpy
    converts all to a common dtype: it may turn 1 into "1", or round large integers to floats.
    """
    old, new = column.dtype, joined.dtype
    if "O" in (old.kind, new.kind):  # object: each row of a ragged column is an array
        # Compare the dtypes of the first rows, and their shapes without the length.
        return _dtype_text(column) == _dtype_text(joined)
    if old.kind in "iu" and new.kind in "fc":  # integers to floats or complex numbers
        return keeps_integers(column, new)
    # Equal kinds: the dtype only has room for longer strings or larger numbers. Or `joined` has
    # numbers ("iufc"): numpy converts only numbers and bools to numbers, here without a loss.
    # Otherwise numpy has converted the values to strings or bytes.
    return old.kind == new.kind or new.kind in "iufc"


def _dtype_text(column: Array) -> str:
    """Return the dtype of a column as text; if ragged, also the shape of its first row.

    The rows of a ragged column are arrays of different lengths: "ragged float32 of shape ('…', 3)".
    """
    ragged = column.dtype.hasobject
    rows = np.asarray(column[0]) if ragged else column
    dtype = {"S": "byte strings", "U": "text"}.get(rows.dtype.kind, rows.dtype.name)
    return f"ragged {dtype} of shape {('…', *rows.shape[1:])}" if ragged and rows.ndim else dtype


def _result_of(column: Array) -> Array | Ragged:
    """Return a column of a structured array as the user gets it; objects become a `Ragged`."""
    if not column.dtype.hasobject:
        return column
    return Ragged(np.concatenate(column), np.array([len(row) for row in column], np.int64))


def _as_column(name: str, value: Any) -> Array:
    """Return the user's result of a batch as an array with a row for each id.

    If the rows may differ in length, the column is an array of objects, each of which is the array
    of a row. The user may give such rows in three forms: a ragged tensor of a framework, a
    `Ragged`, or a list of arrays. For example, the arrays [1, 2] and [3] become a column of two
    objects.

    Raises:
        ValueError: the rows of a ragged column differ in dtype, or in shape after the first axis.
    """
    if not isinstance(value, (list, tuple)):
        value = to_ragged(value)  # a ragged tensor becomes a `Ragged`; other values stay
    if isinstance(value, Ragged):
        # For example, the values [1, 2, 3] and the lengths [2, 1] become the rows [1, 2] and [3].
        values, lengths = (_as_plain_array(name, part) for part in value)
        rows = ragged_rows(name, Ragged(np.array(values), lengths))
    elif isinstance(value, (list, tuple)) and any(getattr(row, "ndim", 0) for row in value):
        rows = [np.array(_as_plain_array(name, row)) for row in value]
    else:
        return _as_plain_array(name, value)
    column = np.fromiter(rows, object, len(rows))  # np.array would stack rows of equal length
    # `_dtype_text` describes the first row of a column, so call it on columns of a single row: the
    # text has the dtype and the shape without the length, such as "float32 of shape (…, 3)".
    row_dtypes = {_dtype_text(column[row : row + 1]) for row in range(len(rows))}
    if len(row_dtypes) > 1:
        raise ValueError(f"the rows of {name} may only differ in length, got {row_dtypes}")
    return column


def _as_plain_array(name: str, value: Any) -> Array:
    """Return an array, a tensor on any device, or a list of values as a numpy array.

    numpy converts the values of a list to one dtype, which may change a value: [1, "a"] would
    become ["1", "a"]. So the result is compared with the list, and a difference is an error.

    Raises:
        TypeError: masked values, or objects that are neither numbers nor strings.
        ValueError: a list whose values no single dtype can hold.
    """
    # The list, to compare the result with; () for an array, in which numpy changes nothing.
    originals: Any = value if isinstance(value, (list, tuple)) else ()
    if any(isinstance(item, np.ma.MaskedArray) for item in (value, *originals)):
        raise TypeError(f"{name} is masked: fill it, or add values and mask as two results")
    try:
        array = as_array(value.detach().cpu() if hasattr(value, "detach") else value)
        # An array of objects, as TensorFlow has for strings: let numpy find their dtype, as for a
        # list.
        if array.dtype.hasobject:
            originals = array.tolist()
            array = np.array(originals)
    except ValueError as error:
        problem = f"{name} has rows of several shapes: give a list of an array for each id"
        raise ValueError(problem) from error
    if array.dtype.hasobject:
        raise TypeError(f"{name} must be numbers or strings, got objects")
    # Compare each value of the list with what numpy has made of it, such as 1 with "1".
    values = array.ravel().tolist() if originals else []
    for value, original in zip(values, np.array(originals, "O").flat, strict=False):
        item = original.item() if hasattr(original, "item") else original
        if value != item and item == item:  # a NaN differs from itself, and is allowed
            raise ValueError(f"{name} cannot hold {item!r} as {array.dtype}: give one dtype")
    # numpy's code 2 means a dtype of another package, such as bfloat16 of ml_dtypes, which
    # cannot be saved to a file.
    return array.astype(np.float32) if array.dtype.isbuiltin == 2 else array
