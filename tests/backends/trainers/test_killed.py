"""Trainers that only take a dataset, killed at some step, and resumed on other ranks.

The program is examples/hosts/ordered_training.py. Ranks are joined by gloo.
"""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.programs import ADDRESS, EXAMPLES, PYTHON, QUIET, free_port

from twinfeed.samplers import IdSequence, PKBatchSampler, RandomSampler

pytestmark = pytest.mark.frameworks

PROGRAM = EXAMPLES / "hosts" / "ordered_training.py"
STEPS, BATCH, SAVED_EACH = 24, 8, 3  # of the program
# The host and its options, the ranks before the kill, and after it.
CASES = [
    ("ddp", 2, 1),
    ("ddp pk workers", 1, 2),
    ("stateful pk", 2, 2),
    ("stateful workers", 1, 1),
    ("accelerate", 1, 4),
    ("accelerate pk accumulate", 2, 1),
    ("accelerate workers", 4, 2),
    ("fabric", 2, 1),
    ("fabric pk", 1, 2),
    ("lightning workers", 1, 2),
    ("lightning pk accumulate", 2, 1),
    ("trainer", 1, 2),
    ("trainer pk accumulate workers", 2, 1),
    ("trainer workers", 1, 4),
    ("sft", 1, 2),
    ("sft accumulate", 2, 1),
]
SHORT = {("ddp", 2, 1)}


def environments(ranks: int) -> Iterator[dict[str, str]]:
    """Yield the environment of each rank, as a launcher sets it."""
    shared = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": free_port(), "GROUP_RANK": "0"}
    shared |= {"TORCHELASTIC_RUN_ID": "killed", "NODE_RANK": "0", "HF_HUB_OFFLINE": "1"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | shared if ranks > 1 else {}
        yield os.environ | QUIET | own


def train(ranks: int, options: list[str], killed_at: int = 0) -> None:
    """Run all ranks to their end, which is a kill or a success."""
    command = [PYTHON, str(PROGRAM), *options]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"KILLED_AT": str(killed_at)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments(ranks)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    codes = [process.returncode for process in processes]
    if killed_at:
        assert codes[0] == 9, printed[0]
        assert 0 not in codes
    else:
        assert codes == [0] * ranks, printed[0]
    assert not any("records come twice" in text for text in printed)


def steps_of(name: str, ranks: int, accumulated: int) -> list[list[int]]:
    """Return the sorted ids of each step, of all ranks together."""
    files = [Path(f"{name}-{rank}.txt").read_text().splitlines() for rank in range(ranks)]
    batches = [[json.loads(line) for line in lines] for lines in files]
    count = min(map(len, batches)) // accumulated
    parts = [range(step * accumulated, (step + 1) * accumulated) for step in range(count)]
    return [sorted(i for of in batches for number in part for i in of[number]) for part in parts]


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [case if case in SHORT else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_killed_training_resumes_with_ids_of_sampler(
    options: str, before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sft" in options and not find_spec("trl"):
        pytest.skip("needs trl, of the extra `hosts`")
    monkeypatch.chdir(tmp_path)
    words = options.split()
    accumulated = 2 if "accumulate" in words else 1
    sampler = (
        PKBatchSampler(np.arange(63) % 9, p=4, k=2, seed=0)
        if "pk" in words
        else RandomSampler(63, seed=0)
    )
    ids = IdSequence(sampler, epochs=4)[np.arange(STEPS * BATCH)].reshape(STEPS, BATCH)
    expected = np.sort(ids, axis=1).tolist()
    kill = random.Random(f"{options} {before} {after}").randint(SAVED_EACH + 1, STEPS - 1)
    train(before, words, killed_at=kill)
    train(after, [*words, "resume"])
    assert steps_of("before", before, accumulated) == expected[:kill]
    saved = kill // SAVED_EACH * SAVED_EACH
    assert steps_of("after", after, accumulated) == expected[saved:]
