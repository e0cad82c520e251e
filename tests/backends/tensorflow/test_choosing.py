"""`choose`: a sampler chooses from anybody's datasets."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.cases import mark_long
from support.keras_models import Interrupt

from twinfeed.loaders import Selector
from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.tensorflow import choose, original_errors
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    MixtureSampler,
    PKBatchSampler,
    SequentialSampler,
)

CLASSES = 7

# Keras 3.15 converts its variables in a way that numpy 2 warns of when it saves weights.
pytestmark = [
    pytest.mark.usefixtures("graphs_as_written"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def datasets(number: int = CLASSES, size: int | None = None) -> list[tf.data.Dataset]:
    """Datasets of which element m of dataset n is 1000 n + m; without a size, they repeat 20."""
    made = [tf.data.Dataset.range(1000 * n, 1000 * n + (size or 20)) for n in range(number)]
    return made if size else [dataset.repeat() for dataset in made]


def of_classes(**options: Any) -> PKBatchSampler:
    return PKBatchSampler.of_classes(CLASSES, **{"p": 3, "k": 2, "seed": 1, **options})


def mixture(samples: int = 45) -> MixtureSampler:
    orders = [SequentialSampler(20)] * 3
    return MixtureSampler(orders, weights=[3, 1, 2], num_samples=samples, seed=4)


def expected(
    sampler: BatchStream, *, epoch: int = 0, start: int = 0, replay: bool = False
) -> list[list[int]]:
    """The batches of the rest of an epoch, by the slow, plain definition."""
    number_of = mixture().group_of if isinstance(sampler, BatchSampler) else np.asarray
    given = [0] * CLASSES
    out = []
    for e in range(epoch + 1):
        for step, ids in enumerate(sampler.batches(e, 0, len(sampler))):
            batch = []
            wanted = e == epoch and step >= start
            for number in number_of(ids).tolist() if wanted or replay else ():
                batch.append(1000 * number + given[number] % 20)
                given[number] += 1
            if wanted:
                out.append(batch)
    return out


def lists(batches: Any) -> list[list[int]]:
    return [batch.numpy().tolist() for batch in batches]


SAMPLERS: dict[str, Any] = {
    "fixed": of_classes,
    "k at a step": lambda: of_classes(k={0: 2, 3: 3}, batches_per_epoch=5),
    "p at a step": lambda: of_classes(p={0: 2, 2: 5, 4: 3}, batches_per_epoch=6),
    "k in a range": lambda: of_classes(k=(1, 4), batches_per_epoch=9),
    "mixture": lambda: BatchSampler(mixture(), batch_size=7),
    "an empty rank batch": lambda: BatchSampler(mixture(), batch_size=11).shard(3, 4),
}


@pytest.mark.parametrize("name", mark_long(SAMPLERS, but_every=2, first=1))
def test_every_batch_follows_sampler(name: str) -> None:
    """Of the size of its step, in order; and the length is asserted."""
    sampler = SAMPLERS[name]()
    sources = datasets(3 if isinstance(sampler, BatchSampler) else CLASSES)
    loader = choose(sampler, sources, prefetch=len(name) % 3)
    assert len(loader.dataset) == len(loader) == len(sampler)
    assert loader.dataset.element_spec.shape.as_list() == [sampler.fixed_size]
    for epoch in range(2):
        assert loader.epoch == epoch
        assert lists(loader) == expected(sampler, epoch=epoch)


def test_batch_grows_at_scheduled_step() -> None:
    sampler = of_classes(k={0: 2, 1000: 3}, batches_per_epoch=1005)
    found = lists(choose(sampler, datasets()))
    assert found == expected(sampler)
    assert [len(batch) for batch in found[997:1003]] == [6, 6, 6, 9, 9, 9]


def test_empty_rank_batch_keeps_dtype_and_shape() -> None:
    """All ranks together give what one process gives: the sets in the order of the global batch."""
    whole = BatchSampler(mixture(45), batch_size=11)
    numbers = [ids.tolist() for ids in Selector(whole, 3)]
    sources = [tf.data.Dataset.from_tensors({"set": n, "x": [0.5] * 3}).repeat() for n in range(3)]
    ranks = [list(choose(whole.shard(rank, 4), sources)) for rank in range(4)]
    for step, batches in enumerate(zip(*ranks, strict=True)):
        assert np.concatenate([batch["set"] for batch in batches]).tolist() == numbers[step]
    last = [len(batch["set"]) for batch in list(zip(*ranks, strict=True))[-1]]
    assert sorted(last) == [0, 0, 0, 1]
    empty = ranks[last.index(0)][-1]
    assert empty["x"].shape == (0, 3)
    assert empty["x"].dtype == tf.float32


def test_elements_of_any_structure_are_stacked() -> None:
    def element(number: tf.Tensor) -> Any:
        return {
            "pair": (number, tf.strings.as_string(number)),
            "ragged": tf.ragged.range(number[None] % 4),
            "sparse": tf.sparse.from_dense(tf.stack([number, tf.zeros_like(number)])),
        }

    sampler = of_classes(k={0: 2, 1: 3}, batches_per_epoch=3)
    sources = [dataset.map(element) for dataset in datasets()]
    for batch, numbers in zip(choose(sampler, sources), expected(sampler), strict=True):
        assert batch["pair"][0].numpy().tolist() == numbers
        assert batch["pair"][1].numpy().tolist() == [b"%d" % number for number in numbers]
        assert batch["ragged"].to_list() == [[[*range(number % 4)]] for number in numbers]
        assert tf.sparse.to_dense(batch["sparse"])[:, 0].numpy().tolist() == numbers


@pytest.mark.parametrize("k", [2, (1, 3)])
@pytest.mark.parametrize("size", [1, 4])
def test_ended_dataset_is_named_in_error(k: Any, size: int) -> None:
    """Wherever in a batch. The batches before come, and the next pass begins after them."""
    sampler = of_classes(k=k, batches_per_epoch=40)
    sources = datasets(size=100)
    sources[4] = sources[4].take(size)
    whole = expected(sampler)
    short = next(n for n, batch in enumerate(whole) if 4000 + size in batch)
    loader, found = choose(sampler, sources), []  # type: ignore[var-annotated]
    with pytest.raises(ValueError, match=r"dataset 4 \(of 7\) has ended in epoch 0"):
        found.extend(loader)
    assert lists(found) == whole[:short]
    assert (loader.epoch, loader.step) == (0, short)


def test_ended_dataset_is_named_in_other_loops() -> None:
    loader = choose(of_classes(batches_per_epoch=40), datasets(size=4), replay=True)
    with original_errors(), pytest.raises(tf.errors.OpError, match="has ended in epoch"):
        list(loader.dataset)
    with pytest.raises(ValueError, match="has ended in epoch"), original_errors():
        list(loader.dataset)
    loader.set_epoch(2)
    with pytest.raises(ValueError, match="has ended in epoch 2"):
        next(iter(loader))


def test_error_of_dataset_comes_after_earlier_batches() -> None:
    limit = tf.constant(4005, tf.int64)

    def check(number: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.assert_less(number, limit, message="spoiled")]):
            return tf.identity(number)

    sampler = of_classes(k=(1, 3), batches_per_epoch=20)
    sources = datasets()
    sources[4] = sources[4].map(check)
    bad = next(n for n, batch in enumerate(expected(sampler)) if 4005 in batch)
    loader, found = choose(sampler, sources), []  # type: ignore[var-annotated]
    with pytest.raises(tf.errors.InvalidArgumentError, match="spoiled"):
        found.extend(loader)
    assert lists(found) == expected(sampler)[:bad]


@pytest.mark.parametrize(
    "name",
    mark_long(["k in a range", "k at a step", "an empty rank batch"], but_every=3),
)
def test_replay_resumes_exactly(name: str) -> None:
    """In two epochs: each dataset skips what was drawn before, in all epochs."""
    sampler = SAMPLERS[name]()
    sources = datasets(3 if isinstance(sampler, BatchSampler) else CLASSES)
    loader = choose(sampler, sources, replay=True)
    for epoch in range(2):
        assert lists(loader) == expected(sampler, epoch=epoch, replay=True)
        for step in (1, len(sampler) - 1):
            loader.load_state_dict(sampler.state_at(epoch, step))
            assert lists(loader) == expected(sampler, epoch=epoch, start=step, replay=True)


def test_replay_is_exact_with_fixed_shuffle() -> None:
    sampler = of_classes(batches_per_epoch=10)
    sources = [dataset.take(20) for dataset in datasets()]
    shuffled = [one.shuffle(9, seed=1, reshuffle_each_iteration=False).repeat() for one in sources]
    whole = lists(choose(sampler, shuffled))
    other = choose(sampler, shuffled, replay=True)
    other.load_state_dict(sampler.state_at(0, 4))
    assert lists(other) == whole[4:]
    assert whole != expected(sampler)


def test_resume_without_replay_restores_choice_alone() -> None:
    sampler = of_classes(k={0: 2, 4: 3}, batches_per_epoch=8)
    loader = choose(sampler, datasets())
    loader.load_state_dict(sampler.state_at(1, 3))
    found = lists(loader)
    assert found == expected(sampler, epoch=1, start=3)
    exact = expected(sampler, epoch=1, start=3, replay=True)
    assert found != exact
    for one, other in zip(found, exact, strict=True):
        assert [n // 1000 for n in one] == [n // 1000 for n in other]


def test_pass_after_break_continues_after_received_batches() -> None:
    sampler, whole = of_classes(batches_per_epoch=9), []
    loader = choose(sampler, datasets(), replay=True)
    for stop in (2, 1, 4, 9):
        for _, batch in zip(range(stop), loader, strict=False):
            whole.append(batch)
    assert lists(whole) == expected(sampler, replay=True)


def test_dataset_advances_position_like_loader() -> None:
    sampler = of_classes()
    loader = choose(sampler, datasets())
    next(iter(loader.dataset))  # a look
    for epoch in range(2):
        assert lists(loader.dataset) == expected(sampler, epoch=epoch)
    assert loader.epoch == 2
    tracked = loader.track(loader.dataset.map(lambda batch: batch + 1).prefetch(2))
    assert next(tracked).numpy().tolist() == [one + 1 for one in expected(sampler, epoch=2)[0]]
    assert (loader.epoch, loader.step) == (2, 1)
    assert len(list(tracked)) == 2
    loader.set_epoch(5)
    assert lists(loader.dataset) == expected(sampler, epoch=5)


def test_copy_shares_datasets_and_has_own_position() -> None:
    for one in (choose(of_classes(), datasets()), Selector(of_classes(), CLASSES)):
        batches = iter(one)
        next(batches)
        other = copy.copy(one)
        assert (other.epoch, other.step) == (0, 1)
        assert len(list(other)) == len(other) - 1
        assert (one.epoch, one.step, other.epoch, other.step) == (0, 1, 1, 0)


def test_checkpoint_restores_position(tmp_path: Path) -> None:
    loader = choose(of_classes(), datasets(), replay=True)
    batches = iter(loader)
    next(batches)
    path = tf.train.Checkpoint(loader=loader).save(str(tmp_path / "one"))
    other = choose(of_classes(), datasets(), replay=True)
    tf.train.Checkpoint(loader=other).restore(path)
    assert lists(other) == lists(batches)


def network() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True)
    return model


def pairs(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    numbers = tf.cast(batch, tf.float32)
    return tf.stack([numbers / 7000, numbers % 20 / 20], axis=1), numbers[:, None] / 7000


class Kill(Interrupt):
    """Kill a run in mid-epoch."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Know nothing: each run is killed by a callback of its own."""


def test_fit_resumes_to_the_same_weights(tmp_path: Path) -> None:
    """A killed run that is started again ends as a run that was not killed, datasets included."""

    def weights(name: str, *kills: int) -> list[Any]:
        for kill in (*kills, 0):
            loader = choose(
                of_classes(k={0: 2, 8: 3}, batches_per_epoch=6), datasets(), replay=True
            )
            model = network()
            resume = ResumeCallback(loader, tmp_path / name, save_freq=1)
            beside = [Kill(kill)] if kill else []
            with contextlib.suppress(KeyboardInterrupt):
                resume.fit(model, pairs, epochs=2, callbacks=beside, verbose=0)
        assert (loader.epoch, loader.step) == (2, 0)
        return model.get_weights()

    for one, other in zip(weights("whole"), weights("killed", 4, 5), strict=True):
        np.testing.assert_array_equal(one, other)


def test_validation_in_fit_keeps_position(tmp_path: Path) -> None:
    loader = choose(of_classes(), datasets())
    data, resume = loader.dataset.map(pairs), ResumeCallback(loader, tmp_path)
    resume.fit(network(), pairs, validation_data=data, epochs=2, verbose=0)
    assert (loader.epoch, loader.step) == (2, 0)


def test_several_replicas_share_each_batch() -> None:
    """In one process, a strategy cuts each batch for the replicas: nothing is drawn twice."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    sampler = BatchSampler(mixture(), batch_size=6)
    loader = choose(sampler, datasets(3))
    batches = loader.track(strategy.experimental_distribute_dataset(loader.dataset))
    parts = map(strategy.experimental_local_results, batches)
    assert [np.concatenate(part).tolist() for part in parts] == expected(sampler)


def test_batches_lie_on_given_device() -> None:
    batch = next(iter(choose(of_classes(), datasets(), device="/CPU:1")))
    assert "CPU:1" in batch.device


def generated(number: int) -> Iterator[int]:
    yield from range(1000 * number, 1000 * number + 20)


def test_choose_takes_datasets_of_any_kind() -> None:
    """A generator, a shuffle, an interleave, a prefetch; the file of a class on the disk."""
    sampler = of_classes(p=4, batches_per_epoch=20)
    sources = datasets()
    spec = tf.TensorSpec([], tf.int64)
    sources[0] = tf.data.Dataset.from_generator(lambda: generated(0), output_signature=spec)
    sources[0] = sources[0].repeat()
    sources[1] = sources[1].take(20).shuffle(20).repeat()
    sources[2] = sources[2].prefetch(4)
    found = lists(choose(sampler, sources))
    numbers = [np.array(batch) // 1000 for batch in expected(sampler)]
    np.testing.assert_array_equal(np.array(found) // 1000, numbers)
    for number in (0, 1, 2):
        mine = [one for batch in found for one in batch if one // 1000 == number][:20]
        assert sorted(mine) == list(range(1000 * number, 1000 * number + 20))


def test_shapes_that_differ_are_refused_for_batches_of_several_sizes() -> None:
    """TensorFlow refuses those of one size when it makes the batch."""
    shapes = [(2,), (None,), (3,), (2, 1)]

    def source(number: int) -> tf.data.Dataset:
        shape = shapes[number]
        data = tf.data.Dataset.from_tensors(tf.zeros([size or 2 for size in shape])).repeat()
        return data.map(lambda x: {"x": tf.compat.v1.placeholder_with_default(x, shape), "y": 0})

    def made(k: Any, *numbers: int) -> Any:
        classes = len(numbers)
        sampler = PKBatchSampler.of_classes(classes, p=2, k=k, seed=0, batches_per_epoch=9)
        return choose(sampler, [source(number) for number in numbers])

    for numbers in ((2, 0, 1), (0, 3), (0, 1, 0)):
        with pytest.raises(ValueError, match=r"of one static shape, got \[.*map the datasets"):
            made((1, 3), *numbers)
    for numbers in ((2, 0, 1), (0, 3)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="different shapes"):
            list(made(2, *numbers))
    assert {tuple(batch["x"].shape[1:]) for batch in made(2, 0, 1, 0)} == {(2,)}
    assert {tuple(batch["x"].shape[1:]) for batch in made((1, 3), 0, 0, 0)} == {(2,)}
