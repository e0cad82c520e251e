"""Find the record that makes the loss jump, put another in its place, and go on.

One of 1,797 digits was scanned as a negative, at another depth. The feed of the run says which
records the step of the jump had:

    python poisoned_record.py
    python -m twinfeed who --feed poisoned_record.py:feed --step 86
    python poisoned_record.py --look 86
    python poisoned_record.py --replace 1234
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from digits import SEED, load
from torch.nn.functional import cross_entropy

from twinfeed import (
    Feed,
    Index,
    PKBatchSampler,
    TorchLoader,
    open_index,
    pack,
    replaced,
    who,
)

OUT = Path("poisoned-data")
CHECKPOINT, REPLACED = OUT / "checkpoint.pt", OUT / "replaced.json"
STEPS, SAVED_EVERY, POISONED, JUMP = 300, 25, 1234, 10.0


def open_records() -> Index:
    """Open the digits; pack them first, one of them a negative."""
    if not (OUT / "data.index").exists():
        images, labels = load()
        images[POISONED] = 1000 * (16 - images[POISONED])
        pixels = images.reshape(-1, 64).astype(np.float32) / 16
        names = [f"scan{number:04}" for number in range(len(labels))]
        rows = zip(names, pixels, labels.tolist(), strict=True)
        samples = [{"__key__": name, "pixels": row, "label": label} for name, row, label in rows]
        pack(samples, OUT)
    return open_index(OUT / "data.index")


index = open_records()
sampler = PKBatchSampler(index.labels, p=4, k=2, seed=SEED)
if REPLACED.exists():
    sampler = replaced(sampler, json.loads(REPLACED.read_text()))
feed = Feed(index, sampler)


def train(feed: Feed) -> None:
    """Train from the last checkpoint on, until the loss jumps or to the end."""
    torch.manual_seed(SEED)
    model = torch.nn.Linear(64, 10)
    optimiser = torch.optim.SGD(model.parameters(), 0.2)
    with TorchLoader(feed, device="cpu") as loader:
        if CHECKPOINT.exists():
            weights, position = torch.load(CHECKPOINT)
            model.load_state_dict(weights)
            loader.load_state_dict(position)
        while loader.global_step < STEPS:
            for batch in loader:
                loss = cross_entropy(model(batch["pixels"]), batch["label"])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                if loss > JUMP:
                    print(f"the loss jumps to {loss:.1f} at step {loader.global_step}")
                    return
                if loader.global_step % SAVED_EVERY == 0:
                    torch.save((model.state_dict(), loader.state_dict()), CHECKPOINT)
                if loader.global_step == STEPS:
                    break
    print(f"the loss of the last of {STEPS} steps is {loss:.2f}")


def look(step: int) -> None:
    """Print the brightest pixel of the records of a step, the two brightest records first."""
    request = who(feed, step).request
    batch = feed[request.epoch, request.step]
    brightest = batch["pixels"].max(1)
    for place in np.argsort(-brightest)[:2]:
        print(f"{index.describe(batch['id'][place])}: pixels up to {brightest[place]:.0f}")


def replace(record: int) -> None:
    """Put others of its class in the place of a record, from the last checkpoint on; train on."""
    position = torch.load(CHECKPOINT)[1]
    step = position["epoch"] * len(feed) + position["step"]
    alike = np.flatnonzero(index.labels == index.labels[record])
    schedule = {step: {record: alike[alike != record][:3].tolist()}}
    REPLACED.write_text(json.dumps(schedule))
    print(f"going on from step {step} with {schedule[step][record]} in the place of {record}")
    after = feed.with_sampler(replaced(sampler, schedule))
    train(after)
    steps = range(1, STEPS + 1)
    records = [
        [who(each, step).request.records.tolist() for step in steps] for each in (feed, after)
    ]
    differ = [step for step, old, new in zip(steps, *records, strict=True) if old != new]
    print(f"other records in the steps {differ}, the same in all others")


def main() -> None:
    """Train, look at a step, or replace a record and go on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--look", type=int, help="the step to look at")
    parser.add_argument("--replace", type=int, help="the record that must not come again")
    options = parser.parse_args()
    if options.look is not None:
        look(options.look)
    elif options.replace is not None:
        replace(options.replace)
    else:
        train(feed)


if __name__ == "__main__":
    main()
