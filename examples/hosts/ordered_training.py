"""Train by hosts that read a dataset in sequence: kill them at any step, and resume on other ranks.

python ordered_training.py                 # the Trainer of transformers, without a kill
python ordered_training.py accelerate      # or sft, lightning, fabric, ddp, stateful
torchrun --nproc-per-node 2 ordered_training.py accelerate pk resume

Each takes a run up in its folder, and writes the record ids of each batch to a file of its rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from same_ids import report
from torch.utils.data import DataLoader, Dataset

from twinfeed import BatchSampler, PKBatchSampler, RandomSampler, ordered

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
OPTIONS = sys.argv[1:]
STEPS, BATCH, RECORDS = 24, 8, 63  # 63 records: no number of ranks or batches divides them
ACCUMULATED = 2 if "accumulate" in OPTIONS else 1  # batches of a step of the optimizer
WORKERS = 2 if "workers" in OPTIONS else 0
RESUME = "resume" in OPTIONS
KILLED_AT = int(os.environ.get("KILLED_AT", "0"))  # a step, for the tests; 0 is never
LABELS = [number % 9 for number in range(RECORDS)]
SAMPLER = (
    PKBatchSampler(LABELS, p=4, k=2, seed=0) if "pk" in OPTIONS else RandomSampler(RECORDS, seed=0)
)


class Records(Dataset[dict[str, torch.Tensor]]):
    """A dataset of your own. This one has the numbers of its records."""

    def __getitem__(self, record: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(record)])}

    def __len__(self) -> int:
        return RECORDS


class Model(torch.nn.Module):
    """A model that notes the ids that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        note(x[:, 0].long().tolist())
        return {"loss": self.linear(x / RECORDS).square().mean()}


DELIVERED: list[list[int]] = []


def note(ids: list[int]) -> None:
    """Keep the ids of a batch, or end the process as `kill -9` would."""
    if KILLED_AT and len(DELIVERED) == KILLED_AT * ACCUMULATED:
        os._exit(9)
    DELIVERED.append(ids)
    with Path(f"{'after' if RESUME else 'before'}-{RANK}.txt").open("a") as file:
        print(json.dumps(ids), file=file)


def with_trainer() -> None:
    import transformers

    arguments = transformers.TrainingArguments(
        "trainer",
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=BATCH // WORLD_SIZE // ACCUMULATED,
        gradient_accumulation_steps=ACCUMULATED,
        dataloader_num_workers=WORKERS,
        save_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    train = ordered(Records(), SAMPLER)
    trainer = transformers.Trainer(Model(), arguments, train_dataset=train)
    trainer.train(resume_from_checkpoint=RESUME)


def with_sft() -> None:
    import datasets
    import tokenizers
    import transformers
    import trl

    words = {"<pad>": 0, "<eos>": 1} | {str(record): record + 2 for record in range(RECORDS)}
    text = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    text.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=text, pad_token="<pad>", eos_token="<eos>"
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=80, num_attention_heads=2, **sizes)

    class Trainer(trl.SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
            note((inputs["input_ids"][:, 0] - 2).tolist())
            return super().training_step(model, inputs, *others)

    arguments = trl.SFTConfig(
        "sft",
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=BATCH // WORLD_SIZE // ACCUMULATED,
        gradient_accumulation_steps=ACCUMULATED,
        dataloader_num_workers=WORKERS,
        save_steps=3,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        transformers.LlamaForCausalLM(config),
        arguments,
        train_dataset=datasets.Dataset.from_dict({"text": [f"{n} {n}" for n in range(RECORDS)]}),
        processing_class=tokens,
    )
    trainer.train_dataset = ordered(trainer.train_dataset, SAMPLER)  # tokenized by now
    trainer.train(resume_from_checkpoint=RESUME)


def with_accelerate() -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = Model()
    step = saved_step(model)
    train = ordered(Records(), SAMPLER, start=step * BATCH)
    size = BATCH // WORLD_SIZE // ACCUMULATED
    loader = DataLoader(train, batch_size=size, num_workers=WORKERS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in islice(loader, (STEPS - step) * ACCUMULATED):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["x"])["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            save(accelerator.unwrap_model(model), step)


def with_lightning() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.model(batch["x"])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    saved = "lightning/state.ckpt" if RESUME else None
    step = torch.load(saved, weights_only=False)["global_step"] if saved else 0
    train = ordered(Records(), SAMPLER, start=step * BATCH).shard(RANK, WORLD_SIZE)
    size = BATCH // WORLD_SIZE // ACCUMULATED
    saver = lightning.pytorch.callbacks.ModelCheckpoint("lightning", "state", every_n_train_steps=3)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATED,
        use_distributed_sampler=False,
        callbacks=[saver],
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(train, batch_size=size, num_workers=WORKERS)
    trainer.fit(Module(), loader, ckpt_path=saved)


def with_fabric() -> None:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy="ddp")
    fabric.launch()
    model = Model()
    step = saved_step(model)
    train = ordered(Records(), SAMPLER, start=step * BATCH).shard(RANK, WORLD_SIZE)
    loader = DataLoader(train, batch_size=BATCH // WORLD_SIZE, num_workers=WORKERS)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    for number, batch in enumerate(islice(loader, STEPS - step), step + 1):
        fabric.backward(wrapped(batch["x"])["loss"])
        optimizer.step()
        optimizer.zero_grad()
        save(model, number)


def with_ddp() -> None:
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")
    model = Model()
    step = saved_step(model)
    train = ordered(Records(), SAMPLER, start=step * BATCH).shard(RANK, WORLD_SIZE)
    loader = DataLoader(train, batch_size=BATCH // WORLD_SIZE, num_workers=WORKERS)
    for number in fitted(model, islice(loader, STEPS - step), step):
        save(model, number)


def with_stateful() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")
    model = Model()
    step = saved_step(model)
    train = ordered(Records(), SAMPLER).shard(RANK, WORLD_SIZE)  # without start: the state has it
    loader = StatefulDataLoader(train, batch_size=BATCH // WORLD_SIZE, num_workers=WORKERS)
    if step:
        loader.load_state_dict(torch.load(f"loader-{RANK}.pt", weights_only=False))
    for number in fitted(model, islice(loader, STEPS - step), step):
        if number % 3 == 0:
            torch.save(loader.state_dict(), f"loader-{RANK}.pt")
        save(model, number)


def fitted(model: Model, batches: Iterator[dict[str, torch.Tensor]], step: int) -> Iterator[int]:
    """Train, and yield the number of steps after each."""
    several = WORLD_SIZE > 1
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if several else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, batch in enumerate(batches, step + 1):
        wrapped(batch["x"])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        yield number


def save(model: Model, step: int) -> None:
    """Save each third step; no rank goes on before that."""
    if RANK == 0 and step % 3 == 0:
        torch.save({"model": model.state_dict(), "step": step}, "state.pt")
    if WORLD_SIZE > 1:
        torch.distributed.barrier()


def saved_step(model: Model) -> int:
    """Load the model that was saved, and return its step."""
    if not RESUME:
        return 0
    state = torch.load("state.pt")
    model.load_state_dict(state["model"])
    return int(state["step"])


HOSTS: dict[str, Callable[[], None]] = {
    name.removeprefix("with_"): function
    for name, function in list(globals().items())
    if name.startswith("with_")
}


if __name__ == "__main__":
    torch.manual_seed(0)
    HOSTS[next((name for name in OPTIONS if name in HOSTS), "trainer")]()
    if WORLD_SIZE == 1 and not RESUME:
        whole = SAMPLER if "pk" in OPTIONS else BatchSampler(SAMPLER, batch_size=9)
        report(DELIVERED, whole)
