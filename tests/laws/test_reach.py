"""How far one batch reaches through the library: its functions, their files, and their depth."""

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from PIL import Image

import twinfeed.loaders
import twinfeed.samplers
from twinfeed import BatchSampler, DecodeImage, Feed, NumpyLoader, RandomSampler, pack

MOST_FUNCTIONS, MOST_FILES, MOST_FRAMES = 75, 18, 16
"""What a reader of the code has to follow, with an index, `DecodeImage` and a transform."""

FOLDERS = tuple(str(Path(room.__file__).parent) for room in (twinfeed.loaders, twinfeed.samplers))


def own_frames(frame: FrameType | None) -> int:
    """The number of frames of the library in a call stack."""
    depth = 0
    while frame is not None:
        depth += frame.f_code.co_filename.startswith(FOLDERS)
        frame = frame.f_back
    return depth


def transform(sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": sample["image"][::-1].copy(), "label": sample["label"]}


def test_a_batch_passes_through_few_functions_and_files(tmp_path: Path) -> None:
    for number in range(64):
        path = tmp_path / f"photos/class{number % 4}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16, 3), number, np.uint8)).save(path)
    index = pack(tmp_path / "photos", tmp_path / "shards", container="tar")["data"]
    sampler = BatchSampler(RandomSampler(len(index), seed=0), batch_size=32)
    feed = Feed(index, sampler, decode=DecodeImage(size=(8, 8)), transform=transform)
    codes: Counter[CodeType] = Counter()
    depths = [0]

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            codes[frame.f_code] += 1
            depths.append(own_frames(frame))

    batches = iter(NumpyLoader(feed, prefetch=0, threads=0))
    next(batches)
    sys.setprofile(note)
    batch = next(batches)
    sys.setprofile(None)
    assert batch["image"].shape == (32, 8, 8, 3)
    functions = {*codes}  # with comprehensions, which later Pythons inline
    files = {code.co_filename for code in functions}
    found = len(functions), len(files), max(depths)
    most = MOST_FUNCTIONS, MOST_FILES, MOST_FRAMES
    assert all(map(int.__le__, found, most)), (found, sorted(c.co_qualname for c in functions))
