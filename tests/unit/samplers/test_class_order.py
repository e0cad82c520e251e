"""A class order made once: the same streams, from arrays that are mapped and shared."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sampler_cases import LABELS, NAMES, SUPER

from twinfeed.samplers import ClassOrder, PKBatchSampler


def saved(order: ClassOrder, folder: Path) -> ClassOrder:
    """Return the same class order, of mapped files."""
    arrays: dict[str, Any] = {}
    for name in ("records", "starts", "sizes"):
        np.save(folder / f"{name}.npy", getattr(order, name))
        arrays[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return ClassOrder.from_arrays(**arrays, digest=order.digest)


@pytest.mark.parametrize("labels", [LABELS, NAMES], ids=["ints", "strings"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k": 6, "small": "drop"},
        {"coverage": "once"},
        {"records": np.flatnonzero(LABELS % 3 < 2)},
        {"p": 2, "super_labels": SUPER},
    ],
    ids=["plain", "drop", "once", "records", "super"],
)
def test_class_order_gives_same_stream_and_states_as_labels(
    labels: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """Whether it was just made, or mapped from files, or sent to another process."""
    options = {"p": 4, "k": 2, "seed": 5, **options}
    plain = PKBatchSampler(labels, **options)
    order = ClassOrder(labels)
    mapped = PKBatchSampler(saved(order, tmp_path), **options)
    for sampler in (PKBatchSampler(order, **options), mapped, pickle.loads(pickle.dumps(mapped))):
        assert repr(sampler) == repr(plain)
        assert sampler.fingerprint == plain.fingerprint
        for epoch in (0, 2):
            theirs = sampler.batches(epoch, 0, len(sampler))
            assert [b.tolist() for b in theirs] == [
                b.tolist() for b in plain.batches(epoch, 0, len(plain))
            ]


def test_memory_mapped_arrays_pickle_as_a_reference(tmp_path: Path) -> None:
    """A sampler of 300,000 records travels as three paths, and maps the files there."""
    order = saved(ClassOrder(np.arange(300_000) // 100), tmp_path)
    sampler = PKBatchSampler(order, p=4, k=2, seed=0)
    first = sampler.batch(0, 0)
    sent = pickle.dumps(sampler)
    assert len(sent) < 2_000
    clone = pickle.loads(sent)
    assert clone.batch(0, 0).tolist() == first.tolist()
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(order))))
    assert len(pickle.dumps(again)) < 1_000
    assert np.array_equal(again.records, order.records)


def test_slice_of_memory_mapped_array_pickles_its_values(tmp_path: Path) -> None:
    """numpy gives it the file and the offset of the whole."""
    np.save(tmp_path / "all.npy", np.array([9, 9, 1, 0, 2]))
    part = np.load(tmp_path / "all.npy", mmap_mode="r")[2:]
    order = ClassOrder.from_arrays(
        records=part, starts=np.array([0]), sizes=np.array([3]), digest="three"
    )
    assert pickle.loads(pickle.dumps(order)).records.tolist() == [1, 0, 2]


def test_class_order_is_read_only_and_keeps_its_input_writable() -> None:
    """Samplers share it."""
    records, starts, sizes = np.array([1, 0]), np.array([0]), np.array([2])
    order = ClassOrder.from_arrays(records=records, starts=starts, sizes=sizes, digest="two")
    for array in (order.records, order.starts, order.sizes, ClassOrder([1, 1]).records):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    records[0] = 1
    assert repr(order) == "ClassOrder(2 records, 1 class)"


def test_arrays_of_no_class_order_are_refused() -> None:
    """Of another type, of lengths that do not agree, and with sizes that rise."""
    arrays: dict[str, Any] = {
        "records": np.arange(2),
        "starts": np.zeros(1, np.int64),
        "sizes": np.full(1, 2),
    }
    rising = {"records": np.arange(5), "starts": np.arange(3), "sizes": np.array([2, 1, 2])}
    changes: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"records": np.arange(3)}, ValueError),
        ({"starts": np.arange(2)}, ValueError),
        (rising, ValueError),
        ({"sizes": np.ones(1)}, TypeError),
        ({"records": [0, 1]}, TypeError),
        ({"starts": np.zeros((1, 1), int)}, TypeError),
    ]
    for change, kind in changes:
        with pytest.raises(kind, match="must be"):
            ClassOrder.from_arrays(**{**arrays, **change}, digest="two")
