"""A column of strings as two numeric arrays: the UTF-8 of all, and where each ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.index._rows import unsigned


class StringColumn:
    """Hold strings as `text` (uint8) and `ends` (int64[n], or uint32[n] where that is enough), so
    that they can be memory-mapped.

    >>> column = StringColumn.of(["cat", "", "dog"])
    >>> column[0], column[1], column[2], len(column)
    ('cat', '', 'dog', 3)
    """

    def __init__(self, text: npt.NDArray[np.uint8], ends: npt.NDArray[Any], /) -> None:
        self.text = text
        self.ends = ends

    @classmethod
    def of(cls, strings: Iterable[str], /) -> StringColumn:
        """Pack `strings`; a name that is not UTF-8 is kept byte for byte (surrogateescape)."""
        data = [string.encode("utf-8", "surrogateescape") for string in strings]
        ends = np.cumsum([len(item) for item in data], dtype=np.int64)
        text = np.frombuffer(b"".join(data), np.uint8)
        return cls(text, ends.astype(unsigned(len(text))))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, place: int) -> str:
        start = self.ends[place - 1] if place else 0
        return self.text[start : self.ends[place]].tobytes().decode("utf-8", "surrogateescape")

    def tolist(self) -> list[str]:
        """Return every string; for columns small enough to be a list."""
        return [self[place] for place in range(len(self))]

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return the two arrays under the names an index stores them by."""
        return {f"{name}-text": self.text, f"{name}-ends": self.ends}
