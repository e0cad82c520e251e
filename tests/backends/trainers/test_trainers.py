"""Lightning and Accelerate: no double sharding, epochs set, resume; the traps of others."""

import warnings
from importlib import import_module
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from support import PROGRAMS
from support.batches import expected, noted, received
from support.cases import mark_long
from support.programs import run
from support.sampler_cases import CASES
from support.torch_feeds import OPTIONS, RECORDS, pack_words, plain
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from twinfeed.loaders import Feed, Index
from twinfeed.loaders.torch import (
    RecordDataset,
    RequestSampler,
    TorchLoader,
    TorchSampler,
    as_tensors,
)
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
)

# Lightning warns of workers, of checkpoints that it overwrites, and calls what torch retired.
pytestmark = pytest.mark.filterwarnings("ignore")


def random() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5)


def evaluation() -> BatchStream:
    return ExactOnceBatchSampler(RECORDS, batch_size=5)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return pack_words(tmp_path_factory.mktemp("words"))


def whole(index: Index, sampler: BatchStream, **options: Any) -> TorchLoader:
    return TorchLoader(Feed(index, sampler, **OPTIONS), **options)


@pytest.mark.parametrize(
    ("make", "workers"),
    [
        (whole, 0),
        (plain, 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((whole, 1), (plain, 0))),
    ],
)
def test_lightning_fit_gets_all_epochs_and_whole_validations(
    index: Index, tmp_path: Path, make: Any, workers: int
) -> None:
    """Its sanity check takes two validation batches: none may be missing from the validation."""
    from support.lightning_module import Notes, trainer

    module = Notes()
    training, validation = (
        make(index, sampler, num_workers=workers) for sampler in (random(), evaluation())
    )
    options = {"max_epochs": 2, "num_sanity_val_steps": 2, "enable_checkpointing": False}
    trainer(tmp_path, **options).fit(module, training, validation)
    assert module.trained == expected(index, random(), epochs=(0, 1), **OPTIONS)
    sanity, *validations = module.validated
    for epoch, batches in enumerate(validations):
        assert batches == expected(index, evaluation(), epochs=(epoch,), **OPTIONS)
    assert (len(sanity), len(validations)) == (2, 2)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_lightning_validates_on_every_record_of_bare_samplers(tmp_path: Path, workers: int) -> None:
    """In plain DataLoaders, training and validation; their batches are the ids alone."""
    from support.lightning_module import Notes, trainer

    module = Notes(torch.Tensor.tolist)
    training, validation = (
        DataLoader(range(RECORDS), batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
        for sampler in (random(), evaluation())
    )
    options = {"max_epochs": 2, "num_sanity_val_steps": 2, "enable_checkpointing": False}
    trainer(tmp_path, **options).fit(module, training, validation)
    batches = [ids.tolist() for epoch in range(2) for ids in random().batches(epoch, 0, 5)]
    assert module.trained == batches
    validated = [[*chain(*batches)] for batches in module.validated]
    assert validated == [[*range(10)], [*range(RECORDS)], [*range(RECORDS)]]


@pytest.mark.parametrize("limit", [2, 3])
def test_lightning_sets_epoch_with_limit_train_batches(
    index: Index, tmp_path: Path, limit: int
) -> None:
    from support.lightning_module import Notes, trainer

    module = Notes()
    options = {"max_epochs": 3, "limit_train_batches": limit, "enable_checkpointing": False}
    trainer(tmp_path, **options).fit(module, whole(index, random()))
    epochs = [expected(index, random(), (epoch,), **OPTIONS)[:limit] for epoch in range(3)]
    assert module.trained == [batch for epoch in epochs for batch in epoch]


@pytest.mark.parametrize("saved", mark_long([10, 3, 7, 5], but_every=2))
def test_lightning_resumes_at_any_step(index: Index, tmp_path: Path, saved: int) -> None:
    """In mid-epoch and at an epoch's end."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from support.lightning_module import Notes, trainer

    saver = ModelCheckpoint(tmp_path, "state", every_n_train_steps=saved, save_top_k=1)
    first = trainer(tmp_path, max_steps=saved + 1, callbacks=[saver])
    first.fit(Notes(), whole(index, random(), num_workers=1))
    module = Notes()
    again = trainer(tmp_path, max_steps=12, enable_checkpointing=False)
    again.fit(module, whole(index, random()), ckpt_path=tmp_path / "state.ckpt")
    assert module.trained == expected(index, random(), (0, 1, 2), **OPTIONS)[saved:12]


@pytest.mark.parametrize(
    ("saved", "workers"), mark_long([(5, 2), (3, 0), (7, 2), (10, 0)], but_every=3)
)
def test_lightning_resumes_a_stateful_dataloader(
    index: Index, tmp_path: Path, saved: int, workers: int
) -> None:
    """It makes an iterator before it names the epoch, and names two."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from support.lightning_module import Notes, trainer

    def made() -> Any:
        feed = Feed(index, random(), **OPTIONS)
        requests = RequestSampler(feed)
        options = {"collate_fn": as_tensors, "num_workers": workers}
        return StatefulDataLoader(RecordDataset(feed), batch_sampler=requests, **options)

    saver = ModelCheckpoint(tmp_path, "state", every_n_train_steps=saved, save_top_k=1)
    trainer(tmp_path, max_steps=saved + 1, callbacks=[saver]).fit(Notes(), made())
    module = Notes()
    again = trainer(tmp_path, max_steps=12, enable_checkpointing=False)
    again.fit(module, made(), ckpt_path=tmp_path / "state.ckpt")
    assert module.trained == expected(index, random(), (0, 1, 2), **OPTIONS)[saved:12]


@pytest.mark.parametrize(
    ("make", "workers"), mark_long([(whole, 2), (plain, 0), (plain, 2)], but_every=2)
)
def test_lightning_resumes_from_checkpoint_at_epoch_end(
    index: Index, tmp_path: Path, make: Any, workers: int
) -> None:
    """Workers of a plain DataLoader draw before Lightning names the epoch: we name it first."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from support.lightning_module import Notes, trainer

    saver = ModelCheckpoint(tmp_path, "state", save_top_k=1)
    options = {"max_epochs": 1, "callbacks": [saver]}
    trainer(tmp_path, **options).fit(Notes(), make(index, random(), num_workers=workers))
    module, loader = Notes(), make(index, random(), num_workers=workers)
    if make is plain and workers:
        loader.batch_sampler.set_epoch(1)
    again = trainer(tmp_path, max_epochs=3, enable_checkpointing=False)
    again.fit(module, loader, ckpt_path=tmp_path / "state.ckpt")
    assert module.trained == expected(index, random(), (1, 2), **OPTIONS)


@pytest.mark.parametrize("rank", [None, 0])
def test_lightning_replacing_sampler_is_an_error(index: Index, rank: int | None) -> None:
    """It would put its own distributed sampler in; that is an error, not another stream."""
    from lightning.pytorch.utilities.data import _update_dataloader

    sampler = random() if rank is None else random().shard(rank, 2)
    other: Any = DistributedSampler(range(RECORDS), num_replicas=2, rank=0)
    with pytest.raises(TypeError, match=r"use_distributed_sampler=False"):
        _update_dataloader(plain(index, sampler), other)
    with pytest.raises(TypeError, match=r"use_distributed_sampler=False"):
        _update_dataloader(DataLoader(range(RECORDS), batch_sampler=sampler), other)
    with pytest.raises(TypeError, match=r"use_distributed_sampler=False"):
        _update_dataloader(DataLoader(range(RECORDS), batch_sampler=TorchSampler(sampler)), other)


@pytest.mark.parametrize("package", ["lightning.pytorch", "lightning.fabric"])
def test_making_a_sampler_of_ones_own_anew_names_the_option(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They call `type(sampler)(ids, batch_size=…, drop_last=…)`, which nobody wrote."""
    update = import_module(f"{package}.utilities.data")._update_dataloader
    other: Any = DistributedSampler(range(64), num_replicas=2, rank=0)

    def prepare(batches: int) -> None:
        sampler = PKBatchSampler([0, 1] * 32, p=2, k=2, seed=0, batches_per_epoch=batches)
        update(DataLoader(range(64), batch_sampler=sampler), other)  # type: ignore[arg-type]

    for batches, problem in ((30, "takes no batch_size="), (31, "2 processes cannot divide 31")):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(TypeError, match=problem) as caught:
            prepare(batches)
        assert "use_distributed_sampler=False" in str(caught.value)
        assert "sampler.shard(rank, world_size)" in str(caught.value)


@pytest.mark.parametrize("package", ["lightning.pytorch", "lightning.fabric"])
def test_no_batch_sampler_is_made_anew_in_silence(package: str) -> None:
    """They would take any class with `batch_size` and `drop_last` for one like torch's."""
    update = import_module(f"{package}.utilities.data")._update_dataloader
    modes: list[Any] = [{}]
    if package == "lightning.pytorch":  # `predict` replaces batch samplers also on one rank
        stages = import_module("lightning.pytorch.trainer.states").RunningStage
        modes.append({"mode": stages.PREDICTING})
    for (name, make), mode in product(CASES, modes):
        sampler: Any = make()
        other: Any = DistributedSampler(range(64), num_replicas=2, rank=0)
        with pytest.raises(TypeError, match=r"sampler\.shard\(rank, world_size\)"):
            print(name, update(DataLoader(range(64), batch_sampler=sampler), other, **mode))


def test_accelerate_returns_loader_unchanged(index: Index) -> None:
    loader = whole(index, random())
    assert Accelerator(cpu=True).prepare(loader) is loader


def test_accelerate_sets_the_epochs_of_a_prepared_dataloader(index: Index) -> None:
    prepared = Accelerator(cpu=True).prepare(plain(index, random(), num_workers=1))
    got = received(prepared) + received(prepared)
    assert got == expected(index, random(), epochs=(0, 1), **OPTIONS)


SHARED = {"num_processes": 2, "process_index": 1, "put_on_device": False}


def even() -> BatchStream:
    """Return a stream of full batches, which Accelerate can share out."""
    return BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=4)


def test_accelerate_splits_full_batches(index: Index) -> None:
    """To every process the same number of them, each as it is."""
    prepared = prepare_data_loader(plain(index, even().shard(0, 1)), **SHARED)
    for epoch in range(2):
        assert received(prepared) == expected(index, even(), (epoch,), **OPTIONS)[1::2]


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (even().shard(1, 2), r"already is rank 1 of 2.*TorchLoader.*unprepared"),
        (random(), r"lose or repeat records.*sampler\.shard\(rank, world_size\)"),
        (evaluation(), r"lose or repeat records.*sampler\.shard\(rank, world_size\)"),
    ],
)
def test_accelerate_refuses_uneven_batches(index: Index, sampler: BatchStream, words: str) -> None:
    """One rank's batches, batches of several sizes, and evaluations."""
    with pytest.raises(TypeError, match=words):
        prepare_data_loader(plain(index, sampler), **SHARED)


@pytest.mark.parametrize("shared", [{}, SHARED])
@pytest.mark.parametrize("step", [0, 2])
def test_accelerate_skips_batches_in_set_epoch(
    index: Index, shared: dict[str, Any], step: int
) -> None:
    """Of a plain DataLoader: named before the batches are skipped, and before each epoch."""
    mine = slice(1, None, 2) if shared else slice(None)
    prepared = prepare_data_loader(plain(index, even()), **shared)
    got = []
    for epoch in (3, 4):
        prepared.set_epoch(epoch)
        got += received(skip_first_batches(prepared, step) if epoch == 3 else prepared)
    want = [expected(index, even(), (epoch,), **OPTIONS)[mine] for epoch in (3, 4)]
    assert got == want[0][step:] + want[1]


def test_accelerate_resumes_where_iteration_is_set(index: Index) -> None:
    """It would begin its own first epoch, 0, and names that to the sampler."""
    requests = RequestSampler(Feed(index, even(), **OPTIONS))
    requests.set_epoch(2)
    for _ in zip(range(2), requests, strict=False):
        pass
    state = requests.state_dict()
    dataloader = plain(index, even())
    dataloader.batch_sampler.load_state_dict(state)
    prepared = Accelerator(cpu=True).prepare(dataloader)
    prepared.iteration = state["epoch"]
    got = received(prepared) + received(prepared)
    assert got == expected(index, even(), epochs=(2, 3), **OPTIONS)[state["step"] :]


@pytest.mark.long
def test_lightning_resumes_on_two_ranks(tmp_path: Path) -> None:
    """Each in a process of its own, which Lightning starts."""
    out = run(PROGRAMS / "lightning_ranks.py", "--out", str(tmp_path), "--devices", "2")
    assert "of 761 right, each seen once" in out
    assert out.count("of 2: resumed at step 27 with its stream") == 2


def test_accelerate_resumes_on_two_ranks(tmp_path: Path) -> None:
    """Nothing that is pickled is in the checkpoint.

    Before that, nine batches of two processes are refused, as eight would arrive, and what can be
    shared is shared. An evaluation whose last batches differ is gathered with padding, or by
    `Results`.
    """
    out = run(PROGRAMS / "accelerate_ranks.py", "--out", str(tmp_path), ranks=2)
    assert out.count("of 2: as it must be") == 2
    assert out.count("of 2: resumed at step 27 with its stream") == 2
    assert len(list(tmp_path.rglob("loader.json"))) == 1
    assert list(tmp_path.rglob("custom_checkpoint*")) == []  # which Accelerate would unpickle


def test_lightning_setting_another_epoch_than_state_warns(index: Index, tmp_path: Path) -> None:
    """What is saved after `max_steps` ended a fit in mid-epoch says that the epoch is over."""
    from support.lightning_module import Notes, trainer

    first = trainer(tmp_path, max_steps=7, enable_checkpointing=False)
    first.fit(Notes(), whole(index, random()))
    first.save_checkpoint(tmp_path / "state.ckpt")
    again = trainer(tmp_path, max_steps=11, enable_checkpointing=False)
    with (
        pytest.warns(UserWarning, match="the last batches of epoch 1 are skipped"),
        pytest.warns(UserWarning, match="2 of 5 .* of epoch 2 were skipped.* while fit ran"),
    ):
        again.fit(Notes(), whole(index, random()), ckpt_path=tmp_path / "state.ckpt")


def said_by(folder: Path, module: Any, loaders: Any, **options: Any) -> list[str]:
    """What this library warns of in a training."""
    from support.lightning_module import trainer

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(folder, enable_checkpointing=False, **options).fit(module, loaders)
    return [str(one.message) for one in caught if "set_epoch" in str(one.message)]


def test_lightning_restarting_earlier_epoch_warns(index: Index, tmp_path: Path) -> None:
    """The shorter loader of a CombinedLoader has gone on to epochs that are named only later."""
    from lightning.pytorch.utilities import CombinedLoader
    from support.lightning_module import Notes

    class Both(Notes):
        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.trained.append(noted(batch[0]))
            return self.weight * 2

    short = BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5, batches_per_epoch=4)
    long = BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5, batches_per_epoch=10)
    both = CombinedLoader([whole(index, short), whole(index, long)], mode="max_size_cycle")
    (said,) = said_by(tmp_path, Both(), both, max_epochs=2)
    assert "set_epoch starts epoch 1 again" in said


def test_lightning_skipping_batches_warns(index: Index, tmp_path: Path) -> None:
    """It overfits on the first batches of each epoch, which are others in each epoch."""
    from support.lightning_module import Notes

    (said,) = said_by(tmp_path, Notes(), whole(index, random()), max_epochs=3, overfit_batches=2)
    assert "3 of 5 batches of epoch 0 were skipped" in said
    assert "set batches_per_epoch=2 of the sampler" in said


@pytest.mark.parametrize("make", [random, evaluation])
def test_loader_has_set_epoch_where_trainers_look(index: Index, make: Any) -> None:
    """Some look for the sampler of a loader, some for that of its batch sampler."""
    one = whole(index, make())
    one.sampler.set_epoch(3)
    assert one.epoch == 3
    one.batch_sampler.sampler.set_epoch(5)
    assert one.epoch == 5


def test_lightning_overfits_beside_evaluation_without_warning(index: Index, tmp_path: Path) -> None:
    """It would put torch's own sequential sampler into a loader of another order."""
    from support.lightning_module import Notes, trainer

    one = whole(index, random())
    again = whole(index, evaluation())
    module, fitting = Notes(), trainer(tmp_path, max_epochs=1, overfit_batches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(module, one, again)
        fitting.validate(module, again)
    assert not any("val dataloader shuffling" in str(one.message) for one in caught)


def test_second_training_on_one_loader_warns(index: Index, tmp_path: Path) -> None:
    from support.lightning_module import Notes

    loader = whole(index, random())
    assert said_by(tmp_path, Notes(), loader, max_epochs=2) == []
    (said,) = said_by(tmp_path, Notes(), loader, max_epochs=2)
    assert "set_epoch starts epoch 0 again" in said


def test_intended_restart_of_epoch_does_not_warn(index: Index, tmp_path: Path) -> None:
    """A loaded state, an evaluation, and epochs in their order, whatever ends them."""
    one, other = whole(index, random()), whole(index, evaluation())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in (0, 1, 4):
            one.set_epoch(epoch)
            assert len(list(one)) == len(one)
            for _ in range(2):
                other.set_epoch(0)
                next(iter(other))
        next(iter(one))
        state = one.state_dict()
        one.load_state_dict(state)
        one.set_epoch(5)
        next(iter(one))
        one.load_state_dict(state | {"epoch": 0, "step": 0})
        one.set_epoch(0)
        next(iter(one))


def test_loader_inside_dataloader_workers_is_refused(index: Index) -> None:
    """Each worker would give all batches, and the loader here would not move.

    What failed is garbage, and torch waits five seconds for each worker that the collector finds.
    """

    class Wrapped(IterableDataset[Any]):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __iter__(self) -> Any:
            return iter(self.inner)

    loader = whole(index, random(), prefetch=0)
    for inner in (loader, loader.dataloader()):
        serving: Any = iter(DataLoader(Wrapped(inner), batch_size=None, num_workers=2))
        with pytest.raises(RuntimeError, match="each worker of a DataLoader would give every"):
            next(serving)
        serving._shutdown_workers()


def test_fabric_saves_and_loads_the_loader(index: Index, tmp_path: Path) -> None:
    """Without `setup_dataloaders`, which takes torch's DataLoader alone."""
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    sampler = BatchSampler(RandomSampler(len(index), seed=5), batch_size=5)
    feed = Feed(index, sampler).shard(fabric.global_rank, fabric.world_size)
    loader = TorchLoader(feed, device=fabric.device)
    got = [batch["id"].tolist() for batch in islice(loader, 2)]
    fabric.save(tmp_path / "saved", {"loader": loader})
    other = TorchLoader(feed, device=fabric.device)
    fabric.load(tmp_path / "saved", {"loader": other})
    got += [batch["id"].tolist() for batch in other]
    assert got == [ids.tolist() for ids in sampler.batches(0, 0, len(sampler))]
