"""Functions of a batch; spawned workers import no framework for them."""

from typing import Any

import numpy as np


def mixed(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    """MixUp of the rows with the rows in reverse, and what else there is."""
    assert len(batch["id"])  # it is not called for an empty batch
    part = np.float32(np.random.default_rng(seed).beta(0.4, 0.4))
    x, label = batch["x"], batch["label"]
    return {**batch, "x": part * x + (1 - part) * x[::-1], "other": label[::-1], "n": x[:, 0] * 0}


def trimmed(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    """Rows as long as the longest of the batch, as a tokenizer gives them."""
    longest = int(batch["label"].max()) + 1
    return {"tokens": np.full((len(batch["id"]), longest), longest)}
