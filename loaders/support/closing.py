"""What closes at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing(ABC):
    """Enter with itself, close on the way out, whatever the way is."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
