"""What batches are made with: a feed, and what is found out once, before its first batch."""

from __future__ import annotations

from dataclasses import dataclass

from twinfeed.loaders.feed.collate import Collate, FieldSpec
from twinfeed.loaders.feed.config import FeedConfig
from twinfeed.loaders.making.batch_function import BatchFunction


@dataclass(frozen=True)
class CompiledFeed:
    """A feed with what is found out once: the spec of its samples, and its function of batches."""

    config: FeedConfig
    spec: dict[str, FieldSpec]
    function: BatchFunction | None = None

    @property
    def shapes(self) -> tuple[dict[str, FieldSpec], Collate]:
        """The spec and the collation of a batch's fields, as a framework must know them."""
        last = self.function
        return (self.spec, self.config.collate) if last is None else (last.spec, last.how)
