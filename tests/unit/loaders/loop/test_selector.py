"""A sampler as a selector: the number of the source of each record."""

import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinfeed.loaders import Selector
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    MixtureSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    ShardShuffleSampler,
    StateMismatchError,
    ViewSampler,
)

LABELS = np.arange(60) * 7 % 60 % 5  # 12 records of each of five classes


def of_classes(**options: Any) -> PKBatchSampler:
    return PKBatchSampler.of_classes(7, **{"p": 3, "k": {0: 2, 4: 3}, "seed": 1, **options})


def mixture(**options: Any) -> BatchSampler:
    orders = [RandomSampler(9, seed=0), SequentialSampler(5), SequentialSampler(70)]
    order = MixtureSampler(orders, weights=[3, 1, 2], num_samples=45, seed=4)
    return BatchSampler(order, **{"batch_size": 7, **options})


def one_up(ids: Any) -> Any:
    return LABELS[ids] + 1


def of_labels(**options: Any) -> PKBatchSampler:
    return PKBatchSampler(LABELS, **{"p": 3, "k": 4, "seed": 2, **options})


# A sampler, its sources and `source`, and the source of a sample id.
CASES: dict[str, tuple[Callable[[], BatchStream], int, Any, Callable[[int], int]]] = {
    "classes": (of_classes, 7, None, lambda one: one),
    "classes-range": (lambda: of_classes(k=(1, 4)), 7, None, lambda one: one),
    "mixture": (mixture, 3, None, lambda one: 0 if one < 9 else 1 if one < 14 else 2),
    "labels": (of_labels, 5, LABELS, lambda one: int(LABELS[one])),
    "function": (of_labels, 6, one_up, lambda one: int(LABELS[one]) + 1),
    "rank": (lambda: mixture().shard(1, 4), 3, None, lambda one: 0 if one < 9 else 1 + (one > 13)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Selector, list[list[int]]]:
    """A selector, and the numbers of two epochs by the slow, plain definition."""
    make, sources, source, of = CASES[request.param]
    sampler = make()
    batches = [one for e in range(2) for one in sampler.batches(e, 0, len(sampler))]
    return Selector(sampler, sources, source=source), [[of(int(i)) for i in b] for b in batches]


def test_batches_have_the_group_of_each_id(
    case: tuple[Selector, list[list[int]]],
) -> None:
    selector, expected = case
    found = [numbers for _ in range(2) for numbers in selector]
    assert [numbers.tolist() for numbers in found] == expected
    assert all(numbers.dtype == np.int64 for numbers in found)
    assert (selector.epoch, selector.step) == (2, 0)


def test_state_resumes_at_any_step(case: tuple[Selector, list[list[int]]]) -> None:
    selector, expected = case
    for at, numbers in enumerate(expected):
        state = selector.state_dict()
        other = pickle.loads(pickle.dumps(selector))
        other.load_state_dict(state)
        assert next(iter(other)).tolist() == numbers
        selector.load_state_dict(state)
        assert next(iter(selector)).tolist() == numbers
        assert selector.epoch * len(selector) + selector.step == at + 1


def test_drawn_counts_each_source_up_to_the_position(
    case: tuple[Selector, list[list[int]]],
) -> None:
    """Forwards and backwards: neither what was counted last, nor who wrote to it, matters."""
    selector, expected = case
    steps, sources = len(selector), len(selector.drawn())
    for at in [*range(len(expected)), 3, steps + 2, 0, 1, steps]:
        selector.run.seek(at // steps, at % steps)
        before = [number for numbers in expected[:at] for number in numbers]
        counts = selector.drawn()
        assert counts.tolist() == np.bincount(before, minlength=sources).tolist()
        counts += 1


def test_classes_without_records_are_drawn_fairly() -> None:
    sampler = PKBatchSampler.of_classes(1000, p=16, k=4, seed=0)
    assert len(sampler) == 63
    numbers = np.concatenate(list(Selector(sampler, 1000)))
    blocks = numbers.reshape(63, 16, 4)
    assert (blocks == blocks[..., :1]).all()
    assert all(len(set(block[:, 0])) == 16 for block in blocks)
    assert set(np.bincount(numbers)) == {4, 8}


def test_classes_of_one_super_class_share_a_batch() -> None:
    supers = np.arange(12) % 3
    sampler = PKBatchSampler.of_classes(12, p=2, k=3, seed=0, super_labels=supers)
    assert all(len(set(supers[numbers])) == 1 for numbers in Selector(sampler, 12))


def gathered(sampler: BatchStream) -> Callable[[], object]:
    return lambda: Selector(sampler, 5, source=np.zeros(sampler.num_ids, int))


def of_order(order: Any) -> BatchStream:
    return BatchSampler(order, batch_size=4)


REFUSED: list[tuple[Callable[[], object], str]] = [
    *(
        (gathered(sampler), rf"{re.escape(str(sampler))} draws certain records(.|\n)*TensorFlowLo")
        for sampler in (
            of_labels(coverage="once"),
            of_labels(small="drop"),
            of_labels(min_class_size=2),
            of_labels(records=range(50)),
            of_labels().shard(0, 3),
            of_order(ShardShuffleSampler([40, 20], block=8, window=64, seed=0)),
            of_order(ReuseSampler(60, reuse=2, live=8, seed=0)),
            of_order(ViewSampler(SequentialSampler(60), [2] * 30, per_epoch="all", seed=0)),
            mixture(last_batch="pad"),
        )
    ),
    (
        lambda: PKBatchSampler.of_classes(1000, p={0: 4, 9: 8}, k=4, seed=0),
        "batches_per_epoch must be given when p or k changes",
    ),
    (lambda: Selector(of_labels(), 5), "source must be given, as ids of PKBatchSampler"),
    (lambda: Selector(of_classes(), 8), "sources must be 7"),
    (lambda: Selector(of_labels(), 5, source=LABELS[1:]), r"of shape \(59,\) for 60 ids"),
    (lambda: [*Selector(of_labels(), 4, source=LABELS)], r"numbers in \[0, 4\), got 4 for"),
    (
        lambda: next(iter(Selector(of_labels(), 5, source=lambda ids: LABELS[ids] / 1))),
        r"for each of 12 ids, got float64 of shape \(12,\)",
    ),
]


@pytest.mark.parametrize(("call", "word"), REFUSED)
def test_selector_refuses_bad_arguments(call: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()


def test_state_of_another_selector_is_refused() -> None:
    state = Selector(of_classes(), 7).state_dict()
    with pytest.raises(StateMismatchError, match="seed: the state has 1, this sampler has 2"):
        Selector(of_classes(seed=2), 7).load_state_dict(state)


def by_torch(number: int, _: Path) -> Iterator[int]:
    from torch.utils.data import DataLoader, IterableDataset

    class Class(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(1000 * number, 1000 * number + 20))

    return map(int, DataLoader(Class(), batch_size=None))


def by_webdataset(number: int, folder: Path) -> Iterator[int]:
    import webdataset

    path = str(folder / f"{number}.tar")
    with webdataset.TarWriter(path) as writer:
        for n in range(20):
            writer.write({"__key__": f"{n:02}", "cls": 1000 * number + n})
    samples = webdataset.WebDataset(path, shardshuffle=False).decode()
    return (sample["cls"] for sample in samples)


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("read", [by_torch, by_webdataset])  # which leaves its files open
def test_selector_drives_iterators_of_other_libraries(
    read: Callable[[int, Path], Iterator[int]], tmp_path: Path
) -> None:
    """An iterator for each class, and on after a broken pass."""
    classes = [read(number, tmp_path) for number in range(7)]
    selector, given = Selector(of_classes(), 7), []
    for stop in (1, 2):
        for _, numbers in zip(range(stop), selector, strict=False):
            given.append([next(classes[number]) for number in numbers])
    assert (
        sum(len(list(rest)) for rest in classes) == 7 * 20 - 18
    )  # webdataset closes files at ends
    seen, expected = [0] * 7, []
    for ids in of_classes().batches(0, 0, 3):
        batch = []
        for number in ids.tolist():
            batch.append(1000 * number + seen[number])
            seen[number] += 1
        expected.append(batch)
    assert given == expected
