"""Samples to batches: every mode, against a slow definition, and with nothing in the batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from twinfeed.loaders import FieldSpec, Pad, Ragged
from twinfeed.loaders.feed.collate import CollateError, Mode, collate, spec_of

FLOAT = np.dtype(np.float32)


def of(values: list[Any], shape: tuple[int, ...], how: Mode = "stack") -> dict[str, Any]:
    return collate({"x": values}, {"x": FieldSpec(shape, FLOAT)}, how=how)


@given(st.lists(hnp.arrays(FLOAT, (2, 3)), max_size=5))
def test_stack_is_numpy_stack(arrays: list[np.ndarray]) -> None:
    stacked = of(arrays, (2, 3))["x"]
    assert stacked.dtype == FLOAT
    assert stacked.shape == (len(arrays), 2, 3)
    for row, array in zip(stacked, arrays, strict=True):
        np.testing.assert_array_equal(row, array)


@given(st.lists(hnp.arrays(FLOAT, st.tuples(st.integers(0, 4), st.integers(0, 3))), max_size=5))
def test_pad_keeps_every_array_and_its_shape(arrays: list[np.ndarray]) -> None:
    batch = of(arrays, (1, 1), "pad")
    assert batch["x_shape"].tolist() == [list(array.shape) for array in arrays]
    for row, array in zip(batch["x"], arrays, strict=True):
        height, width = array.shape
        np.testing.assert_array_equal(row[:height, :width], array)
        assert not row[height:].any()
        assert not row[:, width:].any()


@given(st.lists(hnp.arrays(FLOAT, st.tuples(st.integers(0, 4), st.just(2))), max_size=5))
def test_ragged_keeps_every_array(arrays: list[np.ndarray]) -> None:
    ragged = of(arrays, (1, 2), "ragged")["x"]
    assert isinstance(ragged, Ragged)
    assert ragged.values.shape[1:] == (2,)
    pieces = np.split(ragged.values, np.cumsum(ragged.lengths))[:-1]
    for piece, array in zip(pieces, arrays, strict=True):
        np.testing.assert_array_equal(piece, array)


def test_pad_of_one_axis_gives_lengths() -> None:
    batch = of([[1], [2, 3]], (1,), "pad")
    assert batch["x"].tolist() == [[1, 0], [2, 3]]
    assert batch["x_length"].tolist() == [1, 2]


def test_pad_takes_a_value_and_a_multiple_of_the_length() -> None:
    how = {"x": Pad(value=-1, multiple=4)}
    arrays = [np.ones((3, 1), int), np.ones((5, 2), int)]
    batch = collate({"x": arrays}, {"x": FieldSpec((3, 1), np.dtype(int))}, how=how)
    assert batch["x"].shape == (2, 8, 2)
    assert (batch["x"] == -1).sum(axis=(1, 2)).tolist() == [13, 6]
    assert batch["x_shape"].tolist() == [[3, 1], [5, 2]]
    assert collate({"x": ()}, {"x": FieldSpec((3,), np.dtype(int))}, how=how)["x"].shape == (0, 0)


@pytest.mark.parametrize("how", ["stack", "pad", "ragged"])
def test_an_empty_batch_has_every_field(how: Mode) -> None:
    spec = {"x": FieldSpec((2, 3), FLOAT), "n": FieldSpec((), np.dtype(np.int64))}
    batch = collate({"x": [], "n": [], "b": []}, spec | {"b": FieldSpec((), None)}, how=how)
    values = batch["x"].values if how == "ragged" else batch["x"]
    assert values.dtype == FLOAT
    assert len(values) == 0
    assert (batch["n"].shape, batch["n"].dtype, batch["b"]) == ((0,), np.int64, [])


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, FLOAT)


OTHER = r"shape \(2, 2\), but \(1,\) in the first record.*: make them equal in decode$"
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: of([ones(1), ones(2)], (1,)), r"'x' has shape \(2,\), but \(1,\).*with 'pad'"),
    (
        lambda: of([ones(2, 2), ones(2, 3)], (2, 2), "ragged"),
        r"'x' has shape \(2, 3\), but \(None, 2\).*with 'pad'$",
    ),
    (
        lambda: of([ones(2, 2, 3), ones(2, 4, 3)], (2, 2, 3)),
        r"in decode, as DecodeImage\(size=\(height, width\)\)",
    ),
    (lambda: of([ones(1), ones(2, 2)], (1,), "pad"), OTHER),
    (lambda: of([ones(1), ones(2, 2)], (1,), "ragged"), OTHER),
    *(
        (lambda value=value: spec_of({"x": value}), f"'x' holds {found}.*in decode or transform")
        for value, found in (
            ([b"a", b"b"], "a list of byte strings"),
            (["a", "b"], "a list of strings"),
            (np.array("abc"), "a ndarray of strings"),
            ([[1], [2, 3]], "a list that is not an array"),
            (
                [1, 2**63 + 1],
                r"a list that is not an array \(float64 cannot hold 9223372036854775809",
            ),
            (
                [[0.5], [2**53 + 1]],
                r"a list .*float64 cannot hold 9007199254740993 of a list: give an",
            ),
            (None, "a NoneType, which"),
            (np.zeros(1, "M8[s]"), r"a ndarray of datetime64\[s\]"),
            (np.zeros(1, np.longdouble), "a ndarray of float128"),
            (np.ma.masked_array([1, 2], [0, 1]), "a MaskedArray"),
        )
    ),
]


@pytest.mark.parametrize(("call", "word"), REFUSED)
def test_collate_refuses_values_that_no_batch_can_hold(
    call: Callable[[], object], word: str
) -> None:
    with pytest.raises(CollateError, match=word):
        call()


UNFIT: list[tuple[Any, Any, str]] = [
    (np.uint8(1), np.int64(1000), "int64 1000 where uint8"),
    (np.zeros(2, np.uint8), np.zeros(2, np.int64), "int64 where uint8"),
    (np.int64(1), 2.7, "float64 2.7 where int64"),
    ([1], [2.7], "float64 where int64"),
    (True, 0.25, "float64 0.25 where bool"),
    (np.float32(1), np.float64(1), "float64 1.0 where float32"),
    (np.uint8(1), 256, "int64 256 where uint8"),
    (0.5, 2**53 + 1, "int64 9007199254740993 where float64"),
    (np.float64(1), np.int64(2**53 + 1), "int64 9007199254740993 where float64"),
    (np.zeros(2), np.array([0, 2**63 - 1]), "int64 where float64"),
    (1, 2**63, "uint64 9223372036854775808 where int64"),
    (np.float16(1), -(2**63), "int64 -9223372036854775808 where float16"),
    (2**63, -1, "int64 -1 where uint64"),
    (1, b"one", "bytes where int64"),
    (1, "one", "str where int64"),
    (np.float32(1), 1e39, r"float64 1e\+39 where float32"),
    (np.zeros(2, np.float16), [np.nan, -70_000.0], "float64 where float16"),
    (b"one", 1, "int64 where bytes"),
    (b"one", "two", "str where bytes"),
    ("one", b"two", "bytes where str"),
]


@pytest.mark.parametrize(("first", "later", "found"), UNFIT)
@pytest.mark.parametrize("how", ["stack", "pad", "ragged"])
def test_lossy_cast_is_refused(first: Any, later: Any, found: str, how: Mode) -> None:
    with pytest.raises(CollateError, match=f"field 'x' holds {found}.* is expected") as caught:
        collate({"x": [first, later]}, spec_of({"x": first}), how=how)
    assert caught.value.position == 1


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("first", "later"), [("float32", 2**24 + 1), ("float16", 100_001), ("bfloat16", 257)]
)
def test_lossy_cast_of_tensors_is_refused(first: str, later: int) -> None:
    """Which torch.stack would promote to floats."""
    import torch

    values = [torch.tensor(1.5, dtype=getattr(torch, first)), torch.tensor(later)]
    with pytest.raises(CollateError, match=f"holds int64 {later} where {first} is") as caught:
        collate({"x": values}, spec_of({"x": values[0]}))
    assert caught.value.position == 1


FIT: list[tuple[Any, Any]] = [
    (np.int64(1), np.uint8(7)),
    (np.float64(1), np.float32(0.5)),
    (np.float32(1), 0.1),
    (np.zeros(2, np.float16), [np.nan, -np.inf]),
    (np.uint8(1), 255),
    (1.5, 2),
    (1.5, 2**53 + 2),
    (1.5, 2**63),
    (2**63, 1),
    (np.float64(1), np.int64(3)),
    (np.zeros(1, ">i4"), np.ones(1, np.int32)),
    ([1, 2], [3, 4]),
]


@pytest.mark.parametrize(("first", "later"), FIT)
def test_lossless_cast_takes_dtype_of_first_value(first: Any, later: Any) -> None:
    spec = spec_of({"x": first})
    batch = collate({"x": [first, later]}, spec)["x"]
    assert batch.dtype == np.asarray(first).dtype.newbyteorder("=") == spec["x"].dtype
    assert batch.dtype.isnative
    np.testing.assert_array_equal(batch[1], np.asarray(later, batch.dtype))


def test_empty_list_has_no_dtype() -> None:
    spec = {"x": FieldSpec((1,), np.dtype(np.int64))}
    batch = collate({"x": [[], [3]]}, spec, how="pad")
    assert batch["x"].tolist() == [[0], [3]]
    assert batch["x"].dtype == np.int64


@given(st.lists(st.text()))
def test_texts_stay_texts(values: list[str]) -> None:
    batch = collate({"x": values}, spec_of({"x": "first"}))["x"]
    assert batch == values
    assert all(type(value) is str for value in batch)


@given(st.lists(st.lists(st.binary())), st.booleans())
def test_lists_of_strings_are_ragged(values: list[Any], text: bool) -> None:
    if text:
        values = [[one.hex() for one in value] for value in values]
    spec = spec_of({"x": ["a" if text else b"a"]}, "ragged")
    ragged = collate({"x": values}, spec, how="ragged")["x"]
    pieces = np.split(ragged.values, np.cumsum(ragged.lengths))[:-1]
    assert [piece.tolist() for piece in pieces] == values


@pytest.mark.parametrize("wrong", ["ab", [b"a"], [["a"]], [None], [1], np.array([["a"]])])
def test_a_list_of_texts_holds_texts(wrong: Any) -> None:
    with pytest.raises(CollateError, match="field 'x' holds ") as caught:
        collate({"x": [["a"], wrong]}, spec_of({"x": ["a"]}, "ragged"), how="ragged")
    assert caught.value.position == 1


def test_batch_arrays_are_aligned_to_64_bytes() -> None:
    """At multiples of 64, wherever numpy's own memory begins."""
    values = [np.ones((7, n + 1)) for n in range(5)]
    spec = {"x": FieldSpec((7, None), np.dtype(np.float64))}
    for how in ("pad", "ragged"):
        for _ in range(20):
            rows = {"x": [one.T for one in values]} if how == "ragged" else {"x": values}
            kind = {"x": FieldSpec((None, 7), np.dtype(np.float64))} if how == "ragged" else spec
            made = collate(rows, kind, how=how)["x"]
            array = made.values if how == "ragged" else made
            assert array.__array_interface__["data"][0] % 64 == 0
    for size in range(1, 40):
        one = FieldSpec((size,), np.dtype(np.uint8))
        made = collate({"x": [np.ones(size, np.uint8)] * 3}, {"x": one})["x"]
        assert made.__array_interface__["data"][0] % 64 == 0


@pytest.mark.parametrize("how", ["stack", "pad", "ragged"])
def test_collate_writes_into_memory_of_empty(how: Mode) -> None:
    """At the beginning of that memory: torch knows pinned memory by its first address."""
    made = []

    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        made.append(np.empty(shape, dtype))
        return made[-1]

    spec = {"x": FieldSpec((2,), FLOAT), "y": FieldSpec((), np.dtype(np.int64))}
    values = {"x": [np.ones(2, np.float32)] * 3, "y": [1, 2, 3]}
    batch = collate(values, spec, how=how, empty=empty)
    rows = batch["x"].values if how == "ragged" else batch["x"]
    starts = [one.__array_interface__["data"][0] for one in (rows, batch["y"])]
    assert starts == [one.__array_interface__["data"][0] for one in made]
