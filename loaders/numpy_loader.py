"""The loader without a framework: batches of numpy arrays."""

from __future__ import annotations

from collections.abc import Generator

from twinfeed.loaders._batcher import Batch
from twinfeed.loaders._loader import Loader
from twinfeed.loaders._making import ahead, making
from twinfeed.loaders._prefetch import Prefetcher
from twinfeed.loaders.feed import Feed


class NumpyLoader(Loader):
    """Iterate over the batches of `feed` as numpy arrays.

    - `prefetch`: batches kept ready ahead of the step. With 0, the calling thread does all work.
    - `threads`: threads that make one batch each. If the sampler reuses decoded images, the threads
      share one batch, and as many others decode one image each for coming batches, beside the live
      images. Default: the processors this process may use, at most 8; no threads if nothing is
      decoded.

    Where a pass begins, and what the state counts: see `Loader`.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> with NumpyLoader(Feed(index, ExactOnceBatchSampler(3, batch_size=2))) as loader:
    ...     for batch in loader:
    ...         print(batch["id"], batch["word"], loader.step)
    [0 1] [b'to', b'be'] 1
    [2] [b'or'] 0
    """

    def __init__(self, feed: Feed, /, *, prefetch: int = 2, threads: int | None = None) -> None:
        super().__init__(feed)
        self.prefetch, self.threads = ahead(feed, prefetch, threads)

    def _begin(self, epoch: int, start: int) -> Prefetcher[Batch] | Generator[Batch, None, None]:
        batches = making(
            self.feed,
            self._reader,
            epoch,
            start,
            threads=self.threads,
            meter=self._meter,
            then=dict,
        )
        return Prefetcher(batches, depth=self.prefetch) if self.prefetch else batches
