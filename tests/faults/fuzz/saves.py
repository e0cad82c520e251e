"""The target of the fuzzer that needs a framework: saves of `ResumeCallback`."""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

from faults.fuzz.mutations import Corpus, must_name
from support.damage import change, mutated
from support.inside import crc32c


@functools.cache
def trained() -> tuple[Any, Any, dict[Path, bytes]]:
    """Return a model, a loader, and the files of their save."""
    import keras
    import numpy as np

    from twinfeed.loaders import Feed, open_index
    from twinfeed.loaders.keras import ResumeCallback
    from twinfeed.loaders.tensorflow import TensorFlowLoader
    from twinfeed.samplers import BatchSampler, RandomSampler

    index = open_index("tar/data.index")
    sampler = BatchSampler(RandomSampler(len(index), seed=1), batch_size=2)
    loader = TensorFlowLoader(Feed(index, sampler))
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
    model.compile("adam", "mse", run_eagerly=True)
    resume = ResumeCallback(loader, "saves")
    resume.fit(model, lambda batch: (batch["id"][:, None], np.ones([2, 1])), verbose=0)
    files = {path: path.read_bytes() for path in Path("saves").rglob("*") if path.is_file()}
    return model, loader, files


def save(_: Corpus, draw: random.Random) -> None:
    """Restore a mutated save, with the right checksums most times."""
    from twinfeed.loaders.keras import ResumeCallback

    model, loader, files = trained()
    shutil.rmtree("saves", ignore_errors=True)
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    folder = max(Path("saves").iterdir())
    file = draw.choice(sorted(folder.iterdir()))
    damage(file, draw)
    sums = folder / "checksums.json"
    forged = file.name not in (sums.name, ".twinfeed") and draw.random() < 0.7
    if forged:
        found = json.loads(sums.read_text())
        found[file.name] = crc32c(file.read_bytes())
        sums.write_text(json.dumps(found))
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 0})
    try:
        ResumeCallback(loader, "saves").restore(model)
    except (OSError, ValueError) as error:
        must_name(error, folder.name)
        if loader.epoch:
            raise AssertionError("a save that cannot be read has moved the loader") from error


def damage(file: Path, draw: random.Random) -> None:
    """Mutate a file of a save: JSON by its values."""
    data = file.read_bytes()
    if file.suffix == ".json" and draw.random() < 0.8:
        value = json.loads(data)
        change(value, draw)
        data = json.dumps(value).encode()
    else:
        data = mutated(data, draw)
    file.write_bytes(data)
