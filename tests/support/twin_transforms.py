"""How the records of the twin law become arrays; spawned workers import no framework for it."""

from typing import Any

import numpy as np

from twinfeed.loaders import DecodeImage


def both(sample: dict[str, Any]) -> dict[str, Any]:
    """Keep the encoded bytes beside the decoded image."""
    return DecodeImage(mode="L")(sample) | {"encoded": sample["image"]}


def brighter(sample: dict[str, Any]) -> dict[str, Any]:
    """An augmentation that draws from the sample's seed."""
    random = np.random.default_rng(sample["seed"])
    return sample | {"image": sample["image"] + random.random(dtype=np.float32)}
