"""Records of two indexes whose field has equal bytes, or that have a group in common.

Only records with a length and CRC-32C that both sides have are read, and compared by SHA-256.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import printable
from twinfeed.loaders.index.index import Index, check_index
from twinfeed.loaders.loop.feed_loader import in_order
from twinfeed.loaders.reading.missing import StoredFields
from twinfeed.loaders.reading.reader import Reader, verified_reader
from twinfeed.loaders.reading.together import read_together
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Ids, Int64s
from twinfeed.loaders.support.progress import progress_bar
from twinfeed.loaders.support.system import processors
from twinfeed.samplers.validate import counted
from twinfeed.samplers.verdict import Verdict

_SLICE = 1 << 20  # rows of an index that are looked at in one call
_MAX_KEYS = 1 << 22  # keys of a side that are sorted at once
_BATCH, _BATCH_BYTES = 256, 1 << 24  # records and bytes that are read in one call
_MAX_SHOWN = 5  # records of a finding that are listed

_Keys = npt.NDArray[np.uint64]
_NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Overlap(Verdict):
    """The result of `overlap`, which prints as text.

    Attributes:
        findings: what was found, as text with the first records: equal records, those of them with
            other labels, and those that could not be read. Without any, `ok` is True.
        records: for each record of the evaluation that has an equal one in training, the first
            equal training record, and the record, int64[n, 2]. Of a single index: for each record
            that repeats an earlier one, the first one, and the record.
        counts: how many training records are equal to the record of each row, int64[n]. Of a single
            index: how many other records.
        records_to_keep: the records of the evaluation that are in no row, in order, int64[m], for
            `records=` of a sampler and `SubsetSampler`.
        classes: the number of rows for each label of the evaluation, the largest first.
        other_labels: the rows whose two records have different labels, int64[k].
        unread: for each record that could not be read, and so not be compared, its side ("training"
            or "evaluation"), its id and the error.
        notes: what is not found.

    >>> from tempfile import mkdtemp
    >>> from twinfeed import pack
    >>> index = pack([{"word": word} for word in (b"to", b"be", b"to")], mkdtemp())["data"]
    >>> found = overlap(index)
    >>> found.records.tolist(), found.records_to_keep.tolist(), found.ok
    ([[0, 2]], [0, 1], False)
    """

    findings: list[str]
    records: Int64s
    counts: Int64s
    records_to_keep: Int64s
    classes: dict[str | int, int]
    other_labels: Int64s
    unread: list[tuple[str, int, str]]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*(self.findings or ["no overlap"]), *self.notes])


_NOTE = "Equal bytes are found: not the same pixels in another file, and no similar records."


@dataclass(frozen=True)
class _Side:
    """The records of one side: all of an index, or those in `ids`, which are sorted."""

    name: str
    index: Index
    ids: Int64s | None

    def __len__(self) -> int:
        return len(self.index if self.ids is None else self.ids)

    def all_ids(self) -> Int64s:
        """Return the ids of all records."""
        return np.arange(len(self.index)) if self.ids is None else self.ids

    def positions(self, ids: Int64s) -> Int64s:
        """Return the positions of ids among all records of the side."""
        return ids if self.ids is None else self.ids.searchsorted(ids)

    def keys(self, field: str, block: int, num_blocks: int) -> tuple[Int64s, _Keys]:
        """Return ids and the key (length, CRC) of each, of one of `num_blocks` ranges of CRCs."""
        table, ids, keys = self.index.table(field), [_NO_IDS], [np.zeros(0, np.uint64)]
        for start in range(0, len(self), _SLICE):
            stop = min(start + _SLICE, len(self))
            part = np.arange(start, stop) if self.ids is None else self.ids[start:stop]
            rows = table[start:stop] if self.ids is None else table[part]
            crc, length = (rows[name].astype(np.uint64) for name in ("crc", "length"))
            of_block = crc * np.uint64(num_blocks) >> np.uint64(32) == block
            of_block &= rows["length"] > 0
            ids.append(part[of_block])
            keys.append((length << np.uint64(32) | crc)[of_block])
        return np.concatenate(ids), np.concatenate(keys)


def overlap(
    train: Index,
    evaluation: Index | None = None,
    /,
    *,
    field: str | tuple[str, str] | None = None,
    group: str | None = None,
    records: Sequence[Ids] | None = None,
    progress: bool = False,
) -> Overlap:
    """Find the records of an evaluation whose field has the same bytes as one in training.

    Of a single index, find the records that repeat an earlier one. A field of bytes is compared,
    whatever the container: a JPEG in a tar, in a TFRecord and in a folder is the same. Only records
    whose length and CRC-32C are on both sides are read. An empty or missing field equals no other.

    Equal pixels in other files, and similar records, are not found.

    Args:
        train: the index of the training.
        evaluation: the index of the evaluation. By default that of the training.
        field: the field to compare, or the names that it has in the two indexes, as
            `("jpg", "image/encoded")`. By default the only field of bytes.
        group: a column of integers, such as a patient or a video, in place of a field: find the
            records of the evaluation whose group has records in training. -1 is no group. Labels
            of classes with names are compared by name, and refused if only one index has names.
            Nothing is read.
        records: the ids of the training, and of the evaluation: `split(index, fraction=0.2,
            seed=0)`. By default all of each index.
        progress: whether to show a progress bar.

    Raises:
        ValueError: several fields or none could be meant, there is no such field of bytes, or a
            group is no column of integers.
        IndexError: an id of `records` outside [0, N).

    >>> from tempfile import mkdtemp
    >>> from twinfeed import overlap, pack
    >>> train = pack([{"word": word} for word in (b"to", b"be", b"or")], mkdtemp())["data"]
    >>> test = pack([{"word": word} for word in (b"not", b"to", b"be")], mkdtemp())["data"]
    >>> found = overlap(train, test)
    >>> found.records.tolist(), found.records_to_keep.tolist()
    ([[0, 1], [1, 2]], [0])
    """
    is_single = evaluation is None and records is None
    sides = _sides(train, evaluation, records)
    if group is None:
        fields = _fields(sides, field)
        pairs, counts, unread = _equal_records(sides, fields, is_single, progress)
        found = f"an equal {' or '.join(dict.fromkeys(fields))}"
    else:
        if field is not None or is_single:
            raise ValueError("group= takes the place of field=, and needs two sides")
        (pairs, counts), unread = _common_groups(sides, group), []
        found = f"the same {group}"
    where, records_of = ("before", "record") if is_single else ("in training", "evaluation record")
    title = f"{found} {where}: {len(pairs):,} of {counted(len(sides[1]), records_of)}"
    return _result(sides, pairs, counts, unread, title, by_bytes=group is None)


def _result(
    sides: tuple[_Side, _Side],
    pairs: Int64s,
    counts: Int64s,
    unread: list[tuple[str, int, str]],
    title: str,
    *,
    by_bytes: bool,
) -> Overlap:
    """Return the result, with its findings; `title` is that of the pairs."""
    is_kept = np.ones(len(sides[1]), bool)
    is_kept[sides[1].positions(pairs[:, 1])] = False
    keep = np.flatnonzero(is_kept) if sides[1].ids is None else sides[1].ids[is_kept]
    labels = _labels(sides[1].index, pairs[:, 1])
    first_labels = _labels(sides[0].index, pairs[:, 0], like=sides[1].index)
    are_comparable = by_bytes and len(first_labels) == len(labels)
    other_labels = np.flatnonzero(are_comparable and first_labels != labels)

    def shown(row: int) -> str:
        first, record = pairs[row].tolist()
        return f"{sides[1].index.describe(record)} = {sides[0].index.describe(first)}"

    findings = [
        _finding(title, map(shown, range(len(pairs)))),
        _finding(
            f"of these, with another label there: {len(other_labels):,}",
            (
                f"{shown(n)}: {labels[n]}, and {first_labels[n]} there"
                for n in other_labels.tolist()
            ),
        ),
        _finding(
            f"not compared, since it could not be read: {counted(len(unread), 'record')}",
            (f"{side} record {record}: {error}" for side, record, error in unread),
        ),
    ]
    classes = dict(Counter(labels.tolist()).most_common())
    notes = (_NOTE,) if by_bytes else ()
    found = [finding for finding in findings if finding]
    return Overlap(found, pairs, counts, keep, classes, other_labels, unread, notes)


def _sides(
    train: Index, evaluation: Index | None, records: Sequence[Ids] | None
) -> tuple[_Side, _Side]:
    """Return the two sides, whose indexes and ids are checked."""
    indexes = [train, train if evaluation is None else evaluation]
    for index in indexes:
        check_index(index)
    ids: list[Int64s | None] = [None, None]
    if records is not None:
        if len(records) != 2:
            raise ValueError(
                "records must be the ids of the training and those of the evaluation, as from "
                f"split(index, fraction=0.2, seed=0), got {len(records)} parts"
            )
        ids = [
            np.unique(checks.check_ids(part, len(index), "records"))
            for part, index in zip(records, indexes, strict=True)
        ]
    names = ("training", "evaluation")
    first, second = map(_Side, names, indexes, ids)
    return first, second


def _fields(sides: tuple[_Side, _Side], field: str | tuple[str, str] | None) -> tuple[str, str]:
    """Return the name of the field on each side, which holds bytes."""
    names = [field, field] if field is None or isinstance(field, str) else [*field]
    if len(names) != 2:
        raise ValueError(f"field must be a name, or two, got {field!r}")
    found = []
    for side, name in zip(sides, names, strict=True):
        of_bytes = [name for name, of in side.index.fields.items() if of.kind == "bytes"]
        only = of_bytes[0] if name is None and len(of_bytes) == 1 else name
        if only not in of_bytes:
            raise ValueError(
                f"field= must name one of the fields of bytes, {of_bytes}, got {name!r}"
            )
        found.append(only)
    return found[0], found[1]


def _equal_records(
    sides: tuple[_Side, _Side], fields: tuple[str, str], is_single: bool, progress: bool
) -> tuple[Int64s, Int64s, list[tuple[str, int, str]]]:
    """Return `Overlap.records`, `counts` and `unread`, by blocks of CRCs, to bound the memory."""
    num_blocks = -(-max(map(len, sides)) // _MAX_KEYS) or 1
    unread: list[tuple[str, int, str]] = []
    found = [(np.zeros((0, 2), np.int64), _NO_IDS)]
    to_read = list(zip(sides[: 2 - is_single], fields, strict=False))
    for block in range(num_blocks):
        keyed = [side.keys(field, block, num_blocks) for side, field in to_read]
        first, last = np.sort(keyed[0][1]), np.sort(keyed[-1][1])
        common = last[1:][last[1:] == last[:-1]] if is_single else last[_is_in(last, first)]
        digests = [
            _digests(side, field, ids[_is_in(keys, common)], unread, progress)
            for (side, field), (ids, keys) in zip(to_read, keyed, strict=True)
        ]
        pairs, counts = _joined(*digests[0], *digests[-1])
        if is_single:  # each record is equal to itself
            is_later = pairs[:, 0] != pairs[:, 1]
            pairs, counts = pairs[is_later], counts[is_later] - 1
        found.append((pairs, counts))
    pairs, counts = map(np.concatenate, zip(*found, strict=True))
    order = np.argsort(pairs[:, 1])
    return pairs[order], counts[order], unread


def _is_in(keys: _Keys, sorted_keys: _Keys) -> npt.NDArray[np.bool_]:
    """Return for each key whether it is among the sorted ones."""
    if not len(sorted_keys):
        return np.zeros(len(keys), bool)
    found = sorted_keys.searchsorted(keys)
    return np.equal(sorted_keys[np.minimum(found, len(sorted_keys) - 1)], keys)


def _digests(
    side: _Side, field: str, ids: Int64s, unread: list[tuple[str, int, str]], progress: bool
) -> tuple[Int64s, Array]:
    """Read records, and return the ids of those that can be read, and their SHA-256, S32[n]."""
    batches = _batches(ids, side.index.table(field)[ids]["length"]) if len(ids) else []
    with verified_reader(side.index) as reader:
        results = in_order(partial(_digests_of, reader, field), batches, threads=processors())
        bar = progress_bar(results, side.name, "batch", progress, len(batches))
        digests = [*chain.from_iterable(bar)]
    is_read = np.array([isinstance(digest, bytes) for digest in digests], bool)
    unread += [(side.name, int(ids[n]), str(digests[n])) for n in np.flatnonzero(~is_read)]
    return ids[is_read], np.array(digests, object)[is_read].astype("S32")


def _batches(ids: Int64s, lengths: Int64s) -> list[Int64s]:
    """Return ids in batches of up to `_BATCH` records, and of some `_BATCH_BYTES`."""
    batch, part = np.arange(len(ids)) // _BATCH, np.cumsum(lengths, dtype=np.int64) // _BATCH_BYTES
    return np.split(ids, np.flatnonzero(np.diff(batch) | np.diff(part)) + 1)


def _digests_of(reader: Reader, field: str, ids: Int64s) -> list[bytes | str]:
    """Return the SHA-256 of a field of records, or the error of one that cannot be read."""
    stored = StoredFields(reader.index, (field,))

    def read(ids: Int64s) -> list[bytes | str]:
        return [sha256(value).digest() for value in stored.read(reader, ids)[field]]

    return list(read_together(read, ids, lambda _, error: " ".join(str(error).split())))


def _joined(
    train_ids: Int64s, train_values: Array, ids: Int64s, values: Array
) -> tuple[Int64s, Int64s]:
    """Return `Overlap.records` and `counts` for records that are equal if their values are."""
    distinct, first, counts = np.unique(train_values, return_index=True, return_counts=True)
    if not len(distinct):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
    found = np.minimum(distinct.searchsorted(values), len(distinct) - 1)
    rows = np.flatnonzero(distinct[found] == values)
    return np.stack([train_ids[first[found[rows]]], ids[rows]], axis=1), counts[found[rows]]


def _common_groups(sides: tuple[_Side, _Side], group: str) -> tuple[Int64s, Int64s]:
    """Return `Overlap.records` and `counts` for records of one group."""
    arguments: list[Any] = []
    have_names = {bool(side.index.classes) for side in sides}
    for side in sides:
        ids, column = side.all_ids(), side.index.columns.get(group)
        if column is None or column.ndim != 1 or column.dtype.kind != "i":
            columns = list(side.index.columns)
            raise ValueError(f"group must be a column of integers, got {group!r} among {columns}")
        if group == "label" and len(have_names) == 2:
            raise ValueError(
                "the labels of one index are names of classes, those of the other are numbers: "
                "build both with label=FromFolder(), or both with numbers"
            )
        ids = ids[column[ids] != -1]
        arguments += [ids, _labels(side.index, ids) if group == "label" else column[ids]]
    return _joined(*arguments)


def _labels(index: Index, ids: Int64s, like: Index | None = None) -> Array:
    """Return the label of each record, by name if classes have names; none if `like` differs."""
    if not index.has_labels or (like and bool(like.classes) != bool(index.classes)):
        return np.zeros(0, np.int64)
    labels, classes = index.labels[ids], index.classes
    return np.array([classes[n] for n in labels.tolist()]) if classes else labels


def _finding(title: str, lines: Iterable[str]) -> str:
    """Return a finding with its first lines, or an empty string without lines."""
    shown = list(islice(lines, _MAX_SHOWN))
    return "\n  ".join(map(printable, [title, *shown])) if shown else ""
