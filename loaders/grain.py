"""A feed as a `grain.MapDataset` of batches. No other module imports grain."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import Feed, recipe_of, require_feed
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.loop.adapter import adapter_of
from twinfeed.loaders.loop.numpy_loader import NumpyLoader
from twinfeed.loaders.loop.run import Run
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.loaders.reading.source import reader_of
from twinfeed.loaders.support.extras import requires_extra
from twinfeed.samplers import StateMismatchError, validate

with requires_extra("twinfeed.loaders.grain", "grain"):
    import grain

__all__ = ["as_map_dataset"]


@validate.show_call("as_map_dataset(feed, epochs=90)")
def as_map_dataset(
    feed: Feed,
    /,
    *,
    epochs: int,
    arrange: Callable[[Batch], Any] | None = None,
) -> grain.MapDataset[Any]:
    """Return the batches of `epochs` epochs as a dataset, by global step: epoch * len(feed) + step.

    Indices beyond the last give the batches of later epochs, and so does `repeat`.

    `to_iter_dataset` of the dataset gives iterators whose state also identifies the feed: a state
    of another feed is refused. Grain itself accepts the state of any dataset. Transformations of
    the dataset before `to_iter_dataset` lose this check; `arrange` does not. A `grain.DataLoader`
    compares the `repr` of its dataset with that in a state: the `repr` of this dataset identifies
    the feed.

    Args:
        feed: what is fed; `feed.shard(rank, world_size)` for one of several processes.
        epochs: the number of epochs of the training. With 1, every epoch of `fit` would get the
            batches of epoch 0.
        arrange: turns a batch into what a training is given, such as `(inputs, targets)`.

    Raises:
        ValueError: the feed reuses decoded images, or its transform sets global states. Both need
            batches in order, but Grain's threads make them in any order.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.samplers import BatchSampler, RandomSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> feed = Feed(index, BatchSampler(RandomSampler(3, seed=0), batch_size=2))
    >>> dataset = as_map_dataset(feed, epochs=2)
    >>> len(dataset), dataset[3]["word"]
    (4, [b'to'])
    """
    if require_feed(feed).sampler.traits.max_cached is not None:
        raise ValueError("reuse of decoded images needs batches in order: use NumpyLoader(feed)")
    if feed.sets_global_state:
        raise ValueError("a Seeded transform sets global states: use NumpyLoader(feed)")
    return _Batches(feed, validate.integer("epochs", epochs, minimum=1), arrange)


class _Batches(grain.MapDataset[Any]):
    """A map-style dataset of the batches of a feed, by global step."""

    def __init__(self, feed: Feed, epochs: int, arrange: Callable[[Batch], Any] | None) -> None:
        super().__init__()
        self._feed, self._epochs, self._arrange = feed, epochs, arrange
        self._batcher = Batcher(recipe_of(feed), reader=reader_of(feed.index))

    def __repr__(self) -> str:
        """Return a string that names the stream of batches, the same in every process."""
        state = NumpyLoader(self._feed).state_dict()
        stream = {name: state[name] for name in ("fingerprint", "records")}
        return f"<batches of {json.dumps(stream)}>"

    def __len__(self) -> int:
        return self._epochs * len(self._feed)

    def __getitem__(self, index: Any) -> Any:
        """Make the batch of a global step; or return the dataset of a slice of steps."""
        if isinstance(index, slice):
            return self.slice(index)
        feed, global_step = self._feed, validate.as_int("index", index)
        if global_step < 0:
            raise IndexError(
                f"index must be at least 0, got {global_step}: the last batch is "
                f"dataset[len(dataset) - 1]"
            )
        request = Request.of(feed.sampler, *divmod(global_step, len(feed)), seeds=feed.seeded)
        batch = self._batcher(request)
        return batch if self._arrange is None else self._arrange(batch)

    def to_iter_dataset(self, *options: Any, **named: Any) -> grain.IterDataset[Any]:
        """Return an IterDataset whose iterators refuse the state of another feed."""
        return _CheckedIterDataset(super().to_iter_dataset(*options, **named), self._feed)


class _CheckedIterDataset(grain.IterDataset[Any]):
    """An IterDataset whose iterators refuse the state of another feed."""

    def __init__(self, parent: grain.IterDataset[Any], feed: Feed) -> None:
        super().__init__(parent)
        self._feed = feed

    def __iter__(self) -> grain.DatasetIterator[Any]:
        Run.check_may_start()
        return _CheckedIterator(iter(self._parent), self._feed)


class _CheckedIterator(grain.DatasetIterator[Any]):
    """An iterator over a feed's batches whose state also names the feed."""

    def __init__(self, parent: grain.DatasetIterator[Any], feed: Feed) -> None:
        super().__init__(parent)
        self._loader: NumpyLoader[Batch] = NumpyLoader(feed)

    def __next__(self) -> Any:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        """Return Grain's state, with the state of the feed at this position as "feed"."""
        state = self._parent.get_state()
        position = divmod(state["next_index"], max(1, len(self._loader)))
        return {**state, "feed": self._loader.state_at(*position)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Set the position to that of a state.

        Raises:
            StateMismatchError: a state of another feed or dataset.
        """
        if not isinstance(state, Mapping) or "feed" not in state:
            raise StateMismatchError("the state has no 'feed': it was saved by another dataset")
        feed_state = state["feed"]
        adapter_of(self._loader).check_state(feed_state)  # raises for the state of another feed
        global_step = feed_state["epoch"] * len(self._loader) + feed_state["step"]
        parent_state = {name: value for name, value in state.items() if name != "feed"}
        self._parent.set_state({**parent_state, "next_index": global_step})
