"""A feed with its inferred spec and checked functions, which is all that a `Batcher` needs."""

from __future__ import annotations

from dataclasses import dataclass

from twinfeed.loaders.batches.batch_function import BatchFunction
from twinfeed.loaders.feed.arguments import FeedConfig
from twinfeed.loaders.feed.collate import Collate, FieldSpec


@dataclass(frozen=True)
class PreparedFeed:
    """A feed, the inferred spec of its samples, and its checked `batch_transform`."""

    config: FeedConfig
    spec: dict[str, FieldSpec]
    batch_function: BatchFunction | None = None

    @property
    def shapes(self) -> tuple[dict[str, FieldSpec], Collate]:
        """The spec of each field of a batch, and how it is collated: frameworks infer shapes."""
        last = self.batch_function
        return (self.spec, self.config.collate) if last is None else (last.spec, last.how)
