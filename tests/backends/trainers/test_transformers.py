"""The route of transformers' `Trainer`: a TorchLoader, whose state lies in the checkpoint."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.torch_feeds import RECORDS, pack_words

from twinfeed.loaders import Feed, Index
from twinfeed.loaders.torch import RecordDataset, RequestSampler, TorchLoader, as_tensors
from twinfeed.samplers import BatchSampler, BatchStream, ExactOnceBatchSampler, RandomSampler

# It uses what torch, numpy and Accelerate are about to retire.
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 5  # of an epoch


def tokens(sample: dict[str, Any]) -> dict[str, Any]:
    """Give every record three tokens made of its length."""
    return {"input_ids": np.full(3, len(sample["word"]))}


def random() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5)


def stream(start: int, stop: int) -> list[list[int]]:
    """The ids of these steps, counted from the first epoch on."""
    return [random().batch(*divmod(step, STEPS)).tolist() for step in range(start, stop)]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return pack_words(tmp_path_factory.mktemp("words"))


def loader(index: Index, sampler: BatchStream, **options: Any) -> TorchLoader:
    return TorchLoader(Feed(index, sampler, decode=tokens), device="cpu", **options)


@pytest.mark.parametrize(
    ("saved", "accumulated", "workers"), [pytest.param(7, 1, 2, marks=pytest.mark.long), (3, 2, 0)]
)
def test_transformers_resumes_at_any_step(
    index: Index, tmp_path: Path, saved: int, accumulated: int, workers: int
) -> None:
    """In mid-epoch, and at the end of an epoch whose steps take two batches."""
    from support.transformers_trainer import Place, Trainer, arguments

    one = loader(index, random(), num_workers=workers)
    options: dict[str, Any] = {
        "save_steps": saved,
        "ignore_data_skip": True,
        "gradient_accumulation_steps": accumulated,
    }
    first = Trainer(
        one, args=arguments(tmp_path, max_steps=saved, **options), callbacks=[Place(one)]
    )
    first.train()
    one.close()
    received = len(first.noted)
    assert first.noted == stream(0, received)

    again = loader(index, random())
    folder = tmp_path / f"checkpoint-{saved}"
    again.load_state_dict(json.loads((folder / "loader.json").read_text()))
    resumed = Trainer(again, args=arguments(tmp_path, max_steps=saved + 6, **options))
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == saved + 6
    assert resumed.noted == stream(received, received + len(resumed.noted))
    assert len(resumed.noted) >= 6


def test_transformers_skipping_batches_of_loader_is_refused(index: Index, tmp_path: Path) -> None:
    """A loaded state and skipped batches would count twice."""
    from support.transformers_trainer import Trainer, arguments

    Trainer(loader(index, random()), args=arguments(tmp_path, max_steps=3, save_steps=3)).train()
    again = Trainer(loader(index, random()), args=arguments(tmp_path, max_steps=4))
    with pytest.raises(AttributeError, match="ignore_data_skip=True"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("saved", [5, 7])
def test_transformers_skips_batches_of_plain_dataloader(
    index: Index, tmp_path: Path, saved: int
) -> None:
    """The other route: no state is loaded, and the trainer sets the epoch of the sampler."""
    from support.transformers_trainer import Trainer, arguments

    def plain() -> Any:
        feed = Feed(index, random(), decode=tokens)
        return torch.utils.data.DataLoader(
            RecordDataset(feed),
            batch_sampler=RequestSampler(feed),
            collate_fn=as_tensors,
        )

    first = Trainer(plain(), args=arguments(tmp_path, max_steps=saved, save_steps=saved))
    first.train()
    assert first.noted == stream(0, saved)
    again = Trainer(plain(), args=arguments(tmp_path, max_steps=11))
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved}"))
    assert again.noted == stream(saved, 11)


@pytest.mark.parametrize("some", [None, range(3, 17)])
@pytest.mark.parametrize("last_batch", ["smaller", "pad"])
def test_transformers_counts_records_of_evaluation(
    index: Index, tmp_path: Path, some: Any, last_batch: Any
) -> None:
    """Its speed is of these, and not of batches of the size that a training has."""
    from support.transformers_trainer import Trainer, arguments

    sampler = ExactOnceBatchSampler(RECORDS, batch_size=7, last_batch=last_batch, records=some)
    evaluation = loader(index, sampler, threads=0)
    options = arguments(tmp_path, label_names=["label"])
    trainer = Trainer(None, evaluation, args=options)
    records = RECORDS if some is None else len(some)
    assert trainer.evaluation_loop(evaluation, "evaluation", True).num_samples == records
    assert len(evaluation.dataset) == records


def test_transformers_evaluates_on_every_record(index: Index, tmp_path: Path) -> None:
    """Its `eval_loss` is a mean of the batches' means; what `compute_metrics` is given is whole."""
    from support.transformers_trainer import Trainer, arguments

    given: list[Any] = []

    def metrics(predicted: Any) -> dict[str, float]:
        given.append(predicted)
        return {"right": (predicted.predictions.argmax(1) == predicted.label_ids).mean()}

    evaluation = loader(index, ExactOnceBatchSampler(RECORDS, batch_size=7))
    options = arguments(tmp_path, label_names=["label"])
    trainer = Trainer(None, evaluation, args=options, compute_metrics=metrics)
    for _ in range(2):
        trainer.noted.clear()
        found = trainer.evaluate()
        rate = found["eval_samples_per_second"] * found["eval_runtime"]
        assert rate == pytest.approx(RECORDS, rel=0.01)  # both are rounded
        assert [number for ids in trainer.noted for number in ids] == list(range(RECORDS))
        assert given[-1].label_ids.tolist() == index.labels.tolist()
        assert given[-1].predictions.shape == (RECORDS, 4)
