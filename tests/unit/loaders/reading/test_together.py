"""Read together: in one call without an error, else one by one, as far as results are needed."""

from __future__ import annotations

from itertools import islice

import pytest

from twinfeed.loaders.reading.together import read_together


def test_items_are_read_again_only_after_an_error_and_when_needed() -> None:
    calls = []

    def read(numbers: list[int]) -> list[float]:
        calls.append(numbers)
        return [6 / number for number in numbers]

    def failed(number: int, error: Exception) -> float:
        return -1.0

    assert list(read_together(read, [3, 2], failed, (ZeroDivisionError,))) == [2, 3]
    assert calls == [[3, 2]]
    found = read_together(read, [3, 0, 2], failed, (ZeroDivisionError,))
    assert list(islice(found, 2)) == [2, -1]
    assert calls == [[3, 2], [3, 0, 2], [3], [0]]
    with pytest.raises(ZeroDivisionError):
        read_together(read, [1, 0], failed)
