"""A base class of context managers that close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing(ABC):
    """A context manager that closes at the end of the block."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
