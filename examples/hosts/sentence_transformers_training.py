"""Fine-tune with sentence-transformers on P×K batches, and resume in mid-epoch.

python sentence_transformers_training.py
torchrun --nproc-per-node 2 sentence_transformers_training.py
"""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
from same_ids import report
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.base.sampler import GroupByLabelBatchSampler
from sentence_transformers.sentence_transformer.losses import BatchHardTripletLoss
from sentence_transformers.sentence_transformer.modules import BoW, Dense
from sentence_transformers.sentence_transformer.training_args import (
    SentenceTransformerTrainingArguments,
)
from transformers import TrainerCallback

from twinfeed import PKBatchSampler

SIZES = [150, 100, 80, 60, 50, 40, 40, 30, 30, 20, 20, 15, 15, 10, 10, 5, 5]
LABELS = np.repeat(np.arange(17), SIZES)
TOPICS, WORDS = [f"topic{label}" for label in range(17)], [f"word{n}" for n in range(680)]
SAMPLER = PKBatchSampler(LABELS, p=8, k=4, seed=0, batches_per_epoch=22)
SAMPLER = SAMPLER.shard(0, 1)  # all batches in each process: Accelerate deals them to the processes
SENTENCES = [f"{TOPICS[label]} {word}" for label, word in zip(LABELS, WORDS, strict=True)]


def p_by_k(dataset: datasets.Dataset, **options: Any) -> PKBatchSampler:
    """Return batches of 8 labels with 4 sentences each."""
    return SAMPLER


class SetEpoch(TrainerCallback):
    """Set the epoch of the sampler: with several processes a resumed trainer does not."""

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **others: Any
    ) -> None:
        SAMPLER.set_epoch(state.global_step // len(train_dataloader))


class Trainer(SentenceTransformerTrainer):
    """A trainer that keeps the records of its batches, each known by a word of its own."""

    delivered: list[Any]

    def compute_loss(self, model: Any, inputs: dict[str, Any], *others: Any, **options: Any) -> Any:
        words = inputs["sentence_sentence_embedding"][:, len(TOPICS) :]
        self.delivered.append(words.argmax(1))
        return super().compute_loss(model, inputs, *others, **options)


def train(steps: int, delivered: list[Any], *, resume: bool = False) -> Any:
    """Train a new model up to a step, from the start or the checkpoint; return the arguments."""
    modules = [BoW(TOPICS + WORDS), Dense(len(TOPICS + WORDS), 16)]
    model = SentenceTransformer(modules=modules, device="cpu")
    arguments = SentenceTransformerTrainingArguments(
        "sentence-transformers-run",
        batch_sampler=p_by_k,
        per_device_train_batch_size=32,
        max_steps=steps,
        save_steps=13,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    dataset = datasets.Dataset.from_dict({"sentence": SENTENCES, "label": LABELS})
    trainer = Trainer(
        model,
        arguments,
        train_dataset=dataset,
        loss=BatchHardTripletLoss(model),
        callbacks=[SetEpoch()],
    )
    trainer.delivered = delivered
    trainer.train(resume_from_checkpoint=resume)
    return arguments


def group_by_label() -> None:
    """Print what an epoch of the trainer's own GROUP_BY_LABEL has."""
    dataset = datasets.Dataset.from_dict({"label": LABELS})
    batches = list(
        GroupByLabelBatchSampler(dataset, 32, drop_last=False, valid_label_columns=["label"])
    )
    classes = [len(np.unique(LABELS[batch])) for batch in batches]
    records = len(np.unique(np.concatenate(batches)))
    print(f"GROUP_BY_LABEL: {records} of {len(LABELS)} records,", end=" ")
    print(f"{min(classes)} to {max(classes)} labels in a batch of 32")


if __name__ == "__main__":
    delivered: list[Any] = []
    train(13, delivered)
    arguments = train(50, delivered, resume=True)
    report(delivered, SAMPLER, rank=arguments.process_index, world_size=arguments.world_size)
    group_by_label()
