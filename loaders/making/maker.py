"""Any batch of a feed, in any order: what adapters to other libraries stand on."""

from __future__ import annotations

from typing import Any

from twinfeed.loaders.feed.definition import Batch
from twinfeed.loaders.feed.feed import Feed, check_feed
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.reading.source import reader_of
from twinfeed.loaders.support.closing import Closing


class Maker(Closing):
    """Make any batch of a feed, fast: `maker[epoch, step]`.

    The batches are those that `Feed.batch` defines and every loader gives. They may be asked for in
    any order, by several threads at once. A maker pickles as its feed, and opens files where it
    reads. It reads nothing ahead, and has no position.

    Args:
        feed: what is fed. `len(maker)` is the number of batches of an epoch.
        checksums: whether the bytes of each field are compared with the index's CRC-32C.

    Raises:
        ValueError: the sampler reuses decoded images. In any other order than the stream's, each
            use would decode the image again.
        IndexError: from `maker[epoch, step]`, outside the sampler's epochs and steps.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> with Maker(Feed(index, ExactOnceBatchSampler(3, batch_size=2))) as maker:
    ...     maker[0, 1], len(maker)
    ({'id': array([2]), 'word': [b'or']}, 2)
    """

    def __init__(self, feed: Feed, /, *, checksums: bool = True) -> None:
        if check_feed(feed).sampler._live is not None:
            raise ValueError(
                "a sampler that reuses decoded images gives batches in their order alone: iterate "
                "over a loader, or take the stream without reuse"
            )
        self.feed = feed
        self._checksums = checksums
        self._reader = reader_of(feed.index, checksums=checksums)
        self._batcher = Batcher(feed, reader=self._reader)

    def __len__(self) -> int:
        return len(self.feed)

    def __getitem__(self, position: tuple[int, int], /) -> Batch:
        epoch, step = position
        return self._batcher(Request.of(self.feed.sampler, epoch, step, seeds=self.feed._seeded))

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.feed, self._checksums)

    def close(self) -> None:
        """Close the open files; a later batch opens them anew."""
        self._batcher.close()
        self._reader.close()


def _made(feed: Feed, checksums: bool) -> Maker:
    return Maker(feed, checksums=checksums)
