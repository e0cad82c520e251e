"""Samples to batches: every mode, against a slow definition, and with nothing in the batch."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from twinfeed.loaders.collate import FieldSpec, Mode, Ragged, check_collate, collate, spec_of

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


@pytest.mark.parametrize("how", ["stack", "pad", "ragged"])
def test_an_empty_batch_has_every_field(how: Mode) -> None:
    spec = {"x": FieldSpec((2, 3), FLOAT), "n": FieldSpec((), np.dtype(np.int64))}
    batch = collate({"x": [], "n": [], "b": []}, spec | {"b": FieldSpec((), None)}, how=how)
    values = batch["x"].values if how == "ragged" else batch["x"]
    assert values.dtype == FLOAT
    assert len(values) == 0
    assert (batch["n"].shape, batch["n"].dtype, batch["b"]) == ((0,), np.int64, [])


@pytest.mark.parametrize("how", ["stack", "pad", "ragged"])
def test_padding_is_zeros_and_empty_bytes(how: Mode) -> None:
    spec = spec_of({"x": np.ones(2), "b": b"?"})
    batch = collate({"x": [np.ones(2), None], "b": [b"!", None]}, spec, how=how)
    assert batch["b"] == [b"!", b""]
    if how == "ragged":
        assert batch["x"].lengths.tolist() == [2, 0]
    else:
        assert batch["x"].tolist() == [[1, 1], [0, 0]]


def test_stack_of_unequal_shapes_names_the_field_and_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"'x' has shape \(2,\) beside \(1,\).*'pad' or 'ragged'"):
        of([np.ones(1), np.ones(2)], (1,))


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="stack, pad, ragged, got 'concat'"):
        check_collate({"x": "concat"})  # type: ignore[dict-item]


def test_ragged_arrays_that_differ_beyond_the_first_axis_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"'x' has shape \(2, 3\) beside \(2, 2\).*with 'pad'$"):
        of([np.ones((2, 2)), np.ones((2, 3))], (2, 2), "ragged")
