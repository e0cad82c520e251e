"""Which cases of a law the default run has: the long tests have the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def mark_long(cases: Iterable[Any], *, but_every: int, first: int = 0) -> list[Any]:
    """Mark cases of a parametrized test as long, but every n-th from the first on."""
    marked = []
    for number, case in enumerate(cases):
        if number % but_every == first:
            marked.append(case)
        else:
            values = case if isinstance(case, tuple) else (case,)
            marked.append(pytest.param(*values, marks=pytest.mark.long))
    return marked
