"""Interleaved streams: exact in every period."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twinfeed.samplers.drawing.interleave import Interleave


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=6), start=st.integers(0, 100))
def test_interleaves_are_exact_in_every_window(weights: list[int], start: int) -> None:
    """Any sum(weights) consecutive turns hold each stream by its weight; counts follow."""
    interleave, period = Interleave(np.array(weights), 4), sum(weights)
    stream, before = interleave.elements_at(np.arange(start, start + period))
    assert np.bincount(stream, minlength=len(weights)).tolist() == weights
    assert [
        int(interleave.num_before(start + i)[s]) for i, s in enumerate(stream)
    ] == before.tolist()
