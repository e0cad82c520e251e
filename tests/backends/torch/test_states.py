"""The states of a torch loader: which records they belong to, and which ranks may load them."""

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import expected, noted
from support.torch_feeds import OPTIONS, RECORDS

from twinfeed.loaders import (
    Feed,
    Index,
    pack,
)
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    StateMismatchError,
    WeightedSampler,
)


def packed(folder: Path, words: list[bytes], **options: Any) -> Index:
    samples = [{"word": word, "label": place % 2} for place, word in enumerate(words)]
    return pack(samples, folder, **options)["data"]


def loader_of(index: Index) -> TorchLoader:
    return TorchLoader(Feed(index, BatchSampler(RandomSampler(len(index), seed=0), batch_size=2)))


def test_state_loads_for_other_container_of_equal_records(tmp_path: Path) -> None:
    words = [bytes([65 + n]) * n for n in range(1, 9)]
    indexes = [packed(tmp_path / kind, words, container=kind) for kind in ("tfrecord", "tar")]
    first, second = map(loader_of, indexes)
    ids = [batch["id"].tolist() for batch in islice(first, 2)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    ids += [batch["id"].tolist() for batch in second]
    assert ids == [one.tolist() for one in first.feed.sampler.batches(0, 0, 4)]


@pytest.mark.parametrize(
    "value",
    [lambda n: n, lambda n: n / 2, lambda n: np.arange(3) + n, lambda n: np.arange(n % 3 + 1), str],
    ids=["integer", "float", "numbers", "lists", "text"],
)
def test_state_loads_where_containers_store_numbers_differently(tmp_path: Path, value: Any) -> None:
    """A tar has numbers as text; only digests of the same kind are compared."""
    samples = [{"word": b"x%d" % n, "x": value(n), "label": n % 4} for n in range(8)]
    first, second = (
        loader_of(pack(samples, tmp_path / kind, container=kind)["data"])
        for kind in ("tar", "tfrecord")
    )
    next(iter(first))
    second.load_state_dict(first.state_dict())
    assert second.step == 1
    samples[3]["label"] = 0
    other = loader_of(pack(samples, tmp_path / "other")["data"])
    with pytest.raises(StateMismatchError, match="state was saved with other records: 'label'"):
        other.load_state_dict(first.state_dict())


def test_state_of_other_records_is_refused_by_name(tmp_path: Path) -> None:
    words = [bytes([65 + n]) * n for n in range(1, 9)]
    state = loader_of(packed(tmp_path / "one", words)).state_dict()
    with pytest.raises(StateMismatchError, match="state was saved with other records: 'word'"):
        loader_of(packed(tmp_path / "other", [*words[:-1], b"else"])).load_state_dict(state)


def test_state_without_record_digests_warns(tmp_path: Path) -> None:
    loader = loader_of(packed(tmp_path, [b"a", b"b", b"c"]))
    bare = loader.feed.sampler.state_dict()
    with pytest.warns(UserWarning, match="only the number of records was compared"):
        loader.load_state_dict(bare)


def test_state_dict_computes_no_digest_of_data(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler's data are digested once, not for each state."""
    weighted = BatchSampler(WeightedSampler(np.ones(RECORDS), seed=0), batch_size=4)
    loader = TorchLoader(Feed(index, weighted))
    first = loader.state_dict()
    monkeypatch.setattr(hashlib, "blake2b", None)
    assert loader.state_dict() == first


@pytest.mark.parametrize("sampler", [
    BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5),
    ExactOnceBatchSampler(RECORDS, batch_size=5, last_batch="pad"),
    PKBatchSampler(np.arange(RECORDS) % 4, p=4, k=2, seed=1),
], ids=["random", "exact once", "P x K"])  # fmt: skip
def test_ranks_may_change_on_resume(index: Index, sampler: BatchStream) -> None:
    """Two ranks, then one rank, then four: the concatenated slices stay one stream."""
    whole = expected(index, sampler, epochs=(0, 1), **OPTIONS)
    state = TorchLoader(Feed(index, sampler)).state_dict()
    got = []
    for world_size, steps in ((2, 2), (1, 1), (4, len(sampler))):
        ranks = [TorchLoader(Feed(index, sampler.shard(rank, world_size), **OPTIONS))
                 for rank in range(world_size)]  # fmt: skip
        for loader in ranks:
            loader.load_state_dict(state)
        passes = [iter(loader) for loader in ranks]
        for _ in range(min(steps, len(sampler) - len(got))):
            slices = [next(one) for one in passes]
            got.append(noted({name: _joined(slices, name) for name in slices[0]}))
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert got == whole[: len(got)]
    assert len(got) == len(sampler)


def _joined(slices: list[dict[str, Any]], name: str) -> Any:
    return torch.cat([one[name] for one in slices])
