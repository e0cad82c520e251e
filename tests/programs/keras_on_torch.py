"""What Keras on torch trains and evaluates on, printed as JSON; KERAS_BACKEND is set before."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
from support.torch_feeds import RECORDS, lengths, pack_words
from torch.utils.data import DataLoader

from twinfeed.loaders import Feed, Index
from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.torch import RecordDataset, RequestSampler, TorchLoader, as_tensors
from twinfeed.samplers import BatchSampler, BatchStream, ExactOnceBatchSampler, RandomSampler

EPOCHS = 3


class Noting(keras.layers.Layer):
    """Note the ids that a step is given."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[bool, list[list[int]]] = {True: [], False: []}

    def call(self, ids: Any, training: bool = False) -> Any:
        if ids.device.type != "meta":
            self.noted[training].append(ids[:, 0].int().tolist())
        return ids


def pairs(batch: dict[str, Any]) -> tuple[Any, Any]:
    """Give the id as input, the length as target."""
    return batch["id"][:, None].float(), batch["length"][:, None].float()


def model(*, built: bool) -> tuple[keras.Model, Noting]:
    noting = Noting()
    layers = [noting, keras.layers.Dense(1)]
    network = keras.Sequential([keras.Input([1]), *layers] if built else layers)
    network.compile("sgd", "mse")
    return network, noting


def random() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5)


def loader(index: Index, sampler: BatchStream, **options: Any) -> TorchLoader:
    return TorchLoader(Feed(index, sampler, decode=lengths), device="cpu", **options)


def resumes(index: Index, folder: Path, expected: list[list[int]]) -> None:
    """Break `fit` off in its second epoch, and go on from the last save in another model."""

    class Break(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (one.epoch, one.step) == (1, 3):
                raise KeyboardInterrupt

    network, noting = model(built=False)
    one = loader(index, random())
    resume = ResumeCallback(one, folder, save_freq=2, order="unchecked")
    with suppress(KeyboardInterrupt):
        network.fit(one.dataloader(pairs), epochs=3, verbose=0, callbacks=[resume, Break()])
    assert noting.noted[True] == expected[:8]
    network, noting = model(built=True)
    one = loader(index, random())
    resume = ResumeCallback(one, folder, order="unchecked")
    assert resume.restore(network)
    assert (one.epoch, one.step) == (1, 2)
    network.fit(
        one.dataloader(pairs), initial_epoch=1, epochs=EPOCHS, verbose=0, callbacks=[resume]
    )
    assert noting.noted[True] == expected[7:]
    assert (one.epoch, one.step) == (EPOCHS, 0)


def looks(index: Index, folder: Path, expected: list[list[int]]) -> None:
    """Validate on what is trained on: a whole epoch each time, which moves nothing."""
    network, noting = model(built=True)
    one = loader(index, random())
    dataloader, resume = one.dataloader(pairs), ResumeCallback(one, folder)
    resume.fit(network, pairs, validation_data=dataloader, epochs=EPOCHS, verbose=0)
    assert noting.noted[True] == expected
    assert sorted(np.concatenate(noting.noted[False])) == sorted([*range(RECORDS)] * EPOCHS)
    assert (one.epoch, one.step) == (EPOCHS, 0)


def weighs(index: Index, folder: Path) -> None:
    """Class weights of 0 leave the model as it is."""
    network, _ = model(built=True)
    before = network.get_weights()
    weights = dict.fromkeys(range(RECORDS), 0.0)
    ResumeCallback(loader(index, random()), folder).fit(
        network, pairs, epochs=1, verbose=0, class_weight=weights
    )
    assert all(map(np.array_equal, before, network.get_weights()))


def resumes_by_fit(index: Index, folder: Path, expected: list[list[int]]) -> None:
    """Train by `fit` of the callback: whole, and broken off and started again."""

    class Break(keras.callbacks.Callback):  # type: ignore[misc]
        get_state, set_state = dict, print

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (one.epoch, one.step) == (1, 3):
                raise KeyboardInterrupt

    def weights(network: keras.Model) -> list[Any]:
        return [each.tolist() for each in network.get_weights()]

    ended = []
    for name, callbacks in (("whole", []), ("cut", [Break()]), ("cut", []), ("cut", [])):
        keras.utils.set_random_seed(1)
        one, (network, noting) = loader(index, random()), model(built=False)
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        resume = ResumeCallback(one, folder / name, save_freq=2)
        with suppress(KeyboardInterrupt):
            history = resume.fit(
                network, pairs, epochs=EPOCHS, verbose=0, callbacks=[scheduler, *callbacks]
            )
            ended.append((history.history, weights(network), noting.noted[True]))
    whole, resumed, again = ended
    assert whole[:2] == resumed[:2] == again[:2]
    assert (whole[2], resumed[2], again[2]) == (expected, expected[7:], [])


def plain(index: Index, workers: int, batch_size: int) -> list[int]:
    """Return the epochs that `fit` trains from a plain DataLoader."""
    sampler = BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=batch_size)
    feed = Feed(index, sampler, decode=lengths)
    network, noting = model(built=True)
    dataloader: DataLoader[Any] = DataLoader(
        RecordDataset(feed),
        batch_sampler=RequestSampler(feed),  # type: ignore[arg-type]
        collate_fn=lambda batch: pairs(as_tensors(batch)),
        num_workers=workers,
    )
    network.fit(dataloader, epochs=EPOCHS, verbose=0)
    steps = len(sampler)
    firsts = [sampler.batch(epoch, 0).tolist() for epoch in range(2 * EPOCHS)]
    return [firsts.index(ids) for ids in noting.noted[True][::steps]]


def main(folder: Path) -> None:
    index = pack_words(folder)
    expected = [ids.tolist() for epoch in range(EPOCHS) for ids in random().batches(epoch, 0, 5)]
    said: dict[str, Any] = {}
    for built, workers in ((True, 2), (False, 0)):
        network, noting = model(built=built)
        training = loader(index, random(), num_workers=workers)
        validation = loader(index, ExactOnceBatchSampler(RECORDS, batch_size=7))
        looked_at = next(iter(training.dataloader(pairs)))
        assert np.asarray(looked_at[0])[:, 0].tolist() == expected[0]
        network.fit(
            training.dataloader(pairs),
            validation_data=validation.dataloader(pairs),
            epochs=EPOCHS,
            verbose=0,
        )
        assert noting.noted[True] == expected, (built, workers, noting.noted[True])
        network.evaluate(validation.dataloader(pairs), verbose=0)
        ids_seen = [number for ids in noting.noted[False] for number in ids]
        assert ids_seen == list(range(RECORDS)) * (EPOCHS + 1), (built, workers, ids_seen)
        said[f"built={built}, workers={workers}"] = [training.epoch, training.step]
        training.close()
    resumes(index, folder / "saved", expected)
    looks(index, folder / "looks", expected)
    weighs(index, folder / "weights")
    resumes_by_fit(index, folder / "fit", expected)
    assert plain(index, workers=0, batch_size=5) == [0, 1, 2]
    # As docs/trainers.md says: the workers draw the whole of a short epoch in a pass not used.
    assert plain(index, workers=2, batch_size=12) == [1, 3, 5]
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
