"""The cache of decoded images: each decoded once, never more held than are live."""

import pickle

import numpy as np

from twinfeed.loaders._cache import Decoded, DecodedCache


def decode(records: list[int]) -> list[Decoded]:
    return [{"image": record} for record in records]


def test_an_image_is_decoded_once_for_all_its_uses() -> None:
    cache = DecodedCache(3)
    for use in range(3):
        batch = cache.get((0, use), [4, 9], [use, use], decode)
        assert [sample["image"] for sample in batch] == [4, 9]
    assert (cache.decodes, cache.peak, len(cache)) == (2, 2, 0)


def test_a_jump_starts_afresh() -> None:
    cache = DecodedCache(3)
    cache.get((0, 0), [4], [0], decode)
    cache.get((0, 5), [9], [1], decode)
    assert (cache.decodes, len(cache)) == (2, 1)


def test_an_epoch_starts_afresh() -> None:
    """An image that a lane boundary cuts has its first uses at an epoch's end; nothing stays."""
    cache = DecodedCache(2)
    cache.get((0, 0), [4], [0], decode)
    cache.get((1, 0), [9], [0], decode)
    assert len(cache) == 1


def test_it_pickles_empty() -> None:
    cache = DecodedCache(3)
    cache.get((0, 0), [4], [0], decode)
    copy = pickle.loads(pickle.dumps(cache))
    assert (len(copy), copy.decodes) == (0, 0)
    assert np.array_equal(copy.get((0, 0), [4], [2], decode)[0]["image"], 4)
    assert len(copy) == 0
