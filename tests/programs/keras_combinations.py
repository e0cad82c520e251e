"""Digests of what Keras trains on, for sources and samplers, as JSON; KERAS_BACKEND is set before.

python keras_combinations.py FOLDER SOURCE SAMPLER SOURCE SAMPLER …
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import keras
from support.combinations import digest, feed

from twinfeed.loaders import BACKENDS, NumpyLoader
from twinfeed.loaders.keras import ResumeCallback

BACKEND = keras.config.backend()
LOADER = getattr(import_module(BACKENDS[BACKEND].module), BACKENDS[BACKEND].loader)


class Noting(keras.Model):
    """Note what a step of `fit` is given, and train nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.built = True
        self.noted: list[dict[str, Any]] = []
        self.compile("sgd", run_eagerly=True)

    def train_step(self, *given: Any) -> Any:
        inputs, label = given[-1]
        values = {**inputs, "label": label}
        self.noted.append({n: keras.ops.convert_to_numpy(v) for n, v in values.items()})
        return ({"loss": 0.0}, given[0]) if BACKEND == "jax" else {"loss": 0.0}


def arranged(batch: dict[str, Any]) -> tuple[Any, Any]:
    """Return inputs and a target."""
    return {name: value for name, value in batch.items() if name != "label"}, batch["label"]


def trained(folder: Path, kind: str, sampler: str) -> str:
    """Train two epochs, or an exact pass twice; return the digest of what the model was given."""
    fed, network = feed(folder, kind, sampler), Noting()
    make = NumpyLoader if fed.sampler.world_size > 1 else LOADER
    runs = 2 if fed.sampler.evaluation else 1
    for run in range(runs):
        resume = ResumeCallback(make(fed), folder / f"{BACKEND} {kind} {sampler} {run}")
        resume.fit(network, arranged, epochs=3 - runs, verbose=0)
    return digest(network.noted)


root, *asked = sys.argv[1:]
print(
    json.dumps([trained(Path(root), *pair) for pair in zip(asked[::2], asked[1::2], strict=True)])
)
