"""A source without an index, through everything that makes batches."""

from typing import Any

import numpy as np
import pytest
from support.batches import noted, two_epochs
from support.inside import batcher_of
from support.own_source import LABELS, WORDS, Words, noisy, samplers, size
from support.plain import batches

from twinfeed.loaders import DecodeError, Feed, Index, LoaderError, NumpyLoader, pack
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.samplers import BatchSampler, SequentialSampler, StateMismatchError
from twinfeed.testing import check_source


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """The same records in a shard."""
    samples = [{"word": word, "label": int(n)} for word, n in zip(WORDS, LABELS, strict=True)]
    return pack(samples, tmp_path_factory.mktemp("words"))["data"]


@pytest.mark.parametrize("options", [{}, {"decode": size}, {"decode": size, "transform": noisy}])
def test_source_gives_same_batches_as_index(index: Index, options: dict[str, Any]) -> None:
    check_source(Words())
    check_source(index)
    for sampler in samplers():
        own, other = Feed(Words(), sampler, **options), Feed(index, sampler, **options)
        expected = [noted(batch) for epoch in (0, 1) for batch in batches(other, epoch)]
        assert [noted(batch) for epoch in (0, 1) for batch in batches(own, epoch)] == expected
        for threads in (0, 2):
            assert two_epochs(NumpyLoader(own, threads=threads, readahead=1000)) == expected


@pytest.mark.frameworks
def test_source_in_a_custom_dataloader_gives_same_batches() -> None:
    from torch.utils.data import DataLoader

    from twinfeed.loaders.torch import RecordDataset, RequestSampler, as_tensors

    for sampler in samplers():
        feed = Feed(Words(), sampler, decode=size)
        requests: Any = RequestSampler(feed)
        loader: Any = DataLoader(
            RecordDataset(feed),
            batch_sampler=requests,
            collate_fn=as_tensors,  # type: ignore[arg-type]
        )
        assert [noted(batch) for batch in loader] == [noted(batch) for batch in batches(feed, 0)]


def test_state_of_another_source_is_refused(index: Index) -> None:
    sampler = next(samplers())
    with NumpyLoader(Feed(Words(), sampler)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with NumpyLoader(Feed(Words(), sampler)) as again:
        again.load_state_dict(state)
        assert (again.epoch, again.step) == (0, 1)
    with (
        NumpyLoader(Feed(Words("words-2"), sampler)) as other,
        pytest.raises(StateMismatchError, match=r"'word' has the digest 'words-1'"),
    ):
        other.load_state_dict(state)


def test_decode_error_names_the_record_by_the_source() -> None:
    def picky(sample: dict[str, Any]) -> dict[str, Any]:
        if len(sample["word"]) == 6:
            raise RuntimeError("too long")
        return {"size": len(sample["word"])}

    with (
        NumpyLoader(Feed(Words(), next(samplers()), decode=picky)) as loader,
        pytest.raises(DecodeError, match=r"word number (6|13|20): decode failed.*too long"),
    ):
        list(loader)


def test_error_of_read_names_the_step() -> None:
    class Broken(Words):
        def read(self, ids: Any, fields: Any) -> Any:
            raise OSError("gone")

    with pytest.raises(LoaderError, match="gone") as caught:
        Feed(Broken(), next(samplers()), spec={"word": ((), None)})[1, 2]
    assert caught.value.__notes__ == ["in the batch of epoch 1, step 2"]


class Rows(Words):
    """Rows of an array, and what `read` makes of those that are asked for."""

    fields = ("row",)

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.rows = np.arange(96.0, dtype=np.float32).reshape(24, 4)
        self.give = give

    def read(self, ids: Any, fields: Any) -> Any:
        return {"row": self.give(self, ids)}


@pytest.mark.parametrize(
    "give",
    [
        lambda source, ids: source.rows[int(ids[0]) : int(ids[0]) + len(ids)],
        lambda source, ids: [source.rows[n] for n in ids],
    ],
)
def test_batch_does_not_share_memory_with_the_source(give: Any) -> None:
    """Whatever memory `read` gives, and whatever the loop writes."""
    source = Rows(give)
    sampler = BatchSampler(SequentialSampler(24), batch_size=8)
    whole = source.rows.copy()
    with NumpyLoader(Feed(source, sampler)) as loader:
        got = [batch["row"] for _ in range(2) for batch in loader]
    assert np.concatenate(got).tolist() == [*whole.tolist(), *whole.tolist()]
    for rows in got:
        rows += 1
    assert (source.rows == whole).all()


def test_in_memory_source_starts_no_thread() -> None:
    source = Rows(lambda source, ids: source.rows[ids])
    feed = Feed(source, BatchSampler(SequentialSampler(24), batch_size=8))
    assert NumpyLoader(feed).prefetch == 2
    source.in_memory = True  # type: ignore[attr-defined]
    assert NumpyLoader(feed).prefetch == 0
    assert NumpyLoader(feed, prefetch=1).prefetch == 1
    decoding = Feed(source, feed.sampler, decode=dict)
    assert NumpyLoader(decoding).prefetch == 2


def test_decode_cannot_write_to_arrays_of_the_source() -> None:
    def halved(sample: dict[str, Any]) -> dict[str, Any]:
        sample["row"] /= 2
        return {"row": sample["row"]}

    source = Rows(lambda source, ids: [source.rows[n] for n in ids])
    whole, sampler = source.rows.copy(), BatchSampler(SequentialSampler(24), batch_size=8)
    with pytest.raises(DecodeError, match=r"word number 0.*copy the array before writing"):
        Feed(source, sampler, decode=halved)[0, 0]
    halves = Feed(source, sampler, transform=halved)[0, 0]["row"]  # which gets a copy
    assert (halves == whole[:8] / 2).all()
    assert (source.rows == whole).all()


@pytest.mark.frameworks
def test_a_list_of_tensors_is_one_array() -> None:
    import torch

    source = Rows(lambda source, ids: list(torch.from_numpy(source.rows)[torch.from_numpy(ids)]))
    batch = Feed(source, BatchSampler(SequentialSampler(24), batch_size=8))[0, 1]["row"]
    assert batch.dtype == np.float32
    assert batch.tolist() == source.rows[8:16].tolist()


def test_source_without_digests_warns_when_a_state_is_loaded() -> None:
    source = Words()
    source.digests = {}
    with (
        NumpyLoader(Feed(source, next(samplers()))) as loader,
        pytest.warns(UserWarning, match="share no digest: only the number"),
    ):
        loader.load_state_dict(loader.state_dict())


def test_batcher_closes_the_readers_it_opened() -> None:
    source = Words()
    sampler = next(samplers())
    with batcher_of(Feed(source, sampler)) as batcher:
        before = source.closed
        batcher(Request.of(sampler, 0, 0))
    assert source.closed == before + 1
