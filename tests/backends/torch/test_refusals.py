"""What the loader, the dataset and the sampler for torch refuse."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.own_source import Words
from support.refusals import Call, Refused
from support.threads import started_threads
from support.torch_feeds import RECORDS
from torch.utils.data import DataLoader

from twinfeed.loaders import (
    Feed,
    Index,
)
from twinfeed.loaders.torch import RecordDataset, RequestSampler, TorchLoader, as_tensors
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    RandomSampler,
    ReuseSampler,
    StateMismatchError,
    ViewSampler,
)


def fed(index: Any, sampler: BatchStream | None = None, **options: Any) -> Feed:
    default = BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5)
    return Feed(index, sampler or default, **options)


def whole(sampler: BatchStream | None = None, **options: Any) -> Callable[[Any], TorchLoader]:
    return lambda index: TorchLoader(fed(index, sampler), **options)


def own(**options: Any) -> Callable[[Index], object]:
    """Return what draws from a DataLoader of the user's, whose sampler is made of the feed."""

    def call(index: Index) -> object:
        made = {
            name: one(fed(index)) if "sampler" in name else one for name, one in options.items()
        }
        return next(iter(DataLoader(RecordDataset(fed(index)), **made)))

    return call


def other_feed() -> Feed:
    return Feed({"x": np.arange(5)}, ExactOnceBatchSampler(5, batch_size=2))


def stream(feed: Feed) -> BatchStream:
    return feed.sampler


class Unforked(Words):
    """A source that forked workers cannot use."""

    fork_safe = False


FORKED = {"num_workers": 1, "multiprocessing_context": "fork"}
TWICE = ViewSampler(RandomSampler(RECORDS, seed=5), [2] * RECORDS, per_epoch="one", seed=0)
EVALUATION = ExactOnceBatchSampler(RECORDS, batch_size=5)
REUSING = BatchSampler(ReuseSampler(RECORDS, reuse=3, live=8, seed=2), batch_size=4)
STATE = BatchSampler(RandomSampler(RECORDS, seed=6), batch_size=5).state_dict()


def captions(index: Index) -> Feed:
    side = {"caption": np.zeros(2 * RECORDS)}
    return fed(index, BatchSampler(TWICE, batch_size=5), side=side)


REFUSED: Refused = [
    (TorchLoader, TypeError, r"feed must be Feed\(index, sampler\), got Index"),
    (RecordDataset, TypeError, r"feed must be Feed\(index, sampler\), got Index"),
    (RequestSampler, TypeError, r"feed must be Feed\(index, sampler\), got Index"),
    *((whole(device=one), ValueError, f"here, got {one!r}: ") for one in ("cuda:99", "gpu", 1.5)),
    (whole(prefetch=-1), ValueError, "prefetch must be at least 0, got -1"),
    (whole(threads=-3), ValueError, "threads must be at least 0, got -3"),
    (whole(prefetch=0, num_workers=2), ValueError, "prefetch=0 needs num_workers=0, got"),
    (whole(num_workers=-1), ValueError, "num_workers"),
    (whole(persistent_workers=True), ValueError, "persistent_workers"),
    (whole(REUSING, num_workers=1), ValueError, "needs num_workers=0"),
    (lambda _: whole(**FORKED)(Unforked()), ValueError, "fork_safe=False.*'spawn'"),
    (lambda index: whole()(index).dataset, AttributeError, "no dataset.*ignore_data_skip=True"),
    (lambda index: whole(EVALUATION)(index).dataset[0], TypeError, "read by a RecordDataset"),
    (lambda index: whole()(index).load_state_dict(STATE), StateMismatchError, "seed: .* 6"),
    (lambda index: RecordDataset(fed(index), threads=1.5), TypeError, "must be .*, got 1.5"),
    (lambda index: RecordDataset(fed(index))[RECORDS], IndexError, "24"),
    (lambda index: RecordDataset(fed(index))[-1], IndexError, "must lie in .0, 24., got -1"),
    (lambda index: RecordDataset(fed(index))[1.7], TypeError, "ids must be integers"),  # type: ignore[index]
    (
        lambda index: RecordDataset(fed(index))[next(iter(RequestSampler(other_feed())))],
        ValueError,
        "the request is for one of 5 records, and the dataset has 24: give RequestSampler the feed",
    ),
    (lambda index: RecordDataset(captions(index))[0], ValueError, "'caption' has 48 rows, the in"),
    (own(batch_sampler=RequestSampler), TypeError, "give collate_fn=as_tensors"),
    (own(sampler=RequestSampler), TypeError, "a whole batch: give batch_sampler=RequestSampler"),
    (own(batch_sampler=stream, collate_fn=as_tensors), TypeError, "samples: leave collate_fn out"),
    (own(batch_sampler=RequestSampler, collate_fn=lambda batch: batch["else"]), KeyError, "else"),
    (lambda index: list(DataLoader(fed(index))), TypeError, r"takes RecordDataset\(feed\)"),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_torch_loader_refuses_bad_arguments(
    index: Index, call: Call, kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        call(index)
    assert started_threads() == []
