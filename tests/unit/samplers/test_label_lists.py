"""P×K over records of several labels: P classes, K records each, no record twice in a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfeed.samplers import PKBatchSampler

LISTS = [sorted({n * 7 % 23, n * n % 23, n % 5})[: n % 4] for n in range(400)]


def classes_of(block: np.ndarray, lists: list) -> set:
    """The classes that all records of a block carry."""
    return set.intersection(*(set(lists[record]) for record in block))


@given(
    lists=st.lists(
        st.lists(st.sampled_from("abcdef"), max_size=3, unique=True), min_size=30, max_size=60
    ),
    p=st.integers(1, 4),
    k=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_batches_have_p_classes_with_k_distinct_records(
    lists: list, p: int, k: int, seed: int
) -> None:
    try:
        sampler = PKBatchSampler(lists, p=p, k=k, seed=seed, small="drop", batches_per_epoch=20)
        batches = sampler.batches(0, 0, 20)
    except ValueError:  # too few classes, or classes that share too much
        return
    for ids in batches:
        assert len(set(ids.tolist())) == p * k
        blocks = [classes_of(block, lists) for block in ids.reshape(p, k)]
        assert can_be_distinct(blocks)


def can_be_distinct(blocks: list[set]) -> bool:
    """Whether each block can be of a class of its own."""
    return not blocks or any(
        can_be_distinct([other - {name} for other in blocks[1:]]) for name in sorted(blocks[0])
    )


def test_classes_are_fair_and_batches_without_a_clash_unchanged() -> None:
    """Beside P×K over pairs of record and label, which does not know that records are shared."""
    sampler = PKBatchSampler(LISTS, p=6, k=3, seed=1, batches_per_epoch=200)
    labels = [(record, name) for record, names in enumerate(LISTS) for name in names]
    pairs = PKBatchSampler([name for _, name in labels], p=6, k=3, seed=1, batches_per_epoch=200)
    counts = dict.fromkeys({name for _, name in labels}, 0)
    mended = 0
    for ours, theirs in zip(sampler, pairs, strict=True):
        drawn = [labels[pair] for pair in theirs]
        for place, name in enumerate(name for _, name in drawn[::3]):
            assert name in classes_of(ours[3 * place : 3 * place + 3], LISTS)
            counts[name] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
        if len({record for record, _ in drawn}) == 18:
            assert ours == [record for record, _ in drawn]
        else:
            mended += 1
    assert 5 < mended < 150


def test_classes_of_one_super_class_share_records() -> None:
    """A record's classes are of one super-class, as its own label of it says."""
    lists = [[name for name in names if name % 2 == n % 2] for n, names in enumerate(LISTS)]
    supers = [n % 2 for n in range(len(lists))]
    options = {"super_labels": supers, "small": "drop", "batches_per_epoch": 200}
    sampler = PKBatchSampler(lists, p=4, k=2, seed=1, **options)
    seen = set()
    for ids in sampler:
        assert len(set(ids)) == 8
        assert len({id_ % 2 for id_ in ids}) == 1
        blocks = [classes_of(block, lists) for block in zip(ids[::2], ids[1::2], strict=True)]
        assert can_be_distinct(blocks)
        seen.add(int(ids[0] % 2))
    assert seen == {0, 1}


@pytest.mark.parametrize(
    ("lists", "options", "words"),
    [
        ([["a", "a"], ["b"]], {"p": 1, "k": 1}, "same label twice"),
        ([["a"], "b"], {"p": 1, "k": 1}, "must be lists: .*'b' at 1"),
        ([[1], np.array(2)], {"p": 1, "k": 1}, "must be lists: .*2 at 1"),
        ([{"a"}, {"b"}], {"p": 1, "k": 1}, "must be integers or strings.*{'a'} at 0"),
        ([["a"], {"b"}], {"p": 1, "k": 1}, "must be lists: .*{'b'} at 1"),
        ([["a"], ["b"]], {"p": 1, "k": 1, "coverage": "all"}, "coverage"),
        ([["a"], ["b"]], {"p": 1, "k": 2, "small": "repeat"}, "repeat"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(lists, options: dict, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        PKBatchSampler(lists, seed=0, **options)


def test_classes_that_share_too_much_are_named_when_drawn() -> None:
    lists = [["a", "b", "c"]] * 5 + [["d"]] * 4
    sampler = PKBatchSampler(lists, p=3, k=2, seed=0, batches_per_epoch=30)
    with pytest.raises(ValueError, match="has fewer than 2 records that no other class") as raised:
        sampler.batches(0, 0, 30)
    assert "a" in str(raised.value)
