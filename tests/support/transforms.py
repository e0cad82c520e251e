"""Functions of samples and of batches; spawned workers import no framework for them."""

from typing import Any

import numpy as np

from twinfeed.loaders import DecodeImage


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


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    """An array of the number in a word, and the word."""
    number = int(sample["word"][1:])
    return {"x": np.full((2, 3), number, np.float32), "word": sample["word"]}


def in_place(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    """MixUp that writes into the arrays that it gets."""
    made = mixed(batch, seed)
    batch["x"][...] = made["x"]
    batch["label"] += 1
    return made | {"x": batch["x"], "label": batch["label"]}


def both(sample: dict[str, Any]) -> dict[str, Any]:
    """Keep the encoded bytes beside the decoded image."""
    return DecodeImage(mode="L")(sample) | {"encoded": sample["image"]}


def brighter(sample: dict[str, Any]) -> dict[str, Any]:
    """An augmentation that draws from the sample's seed."""
    random = np.random.default_rng(sample["seed"])
    return sample | {"image": sample["image"] + random.random(dtype=np.float32)}
