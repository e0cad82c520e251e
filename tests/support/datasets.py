"""The same records in each kind of dataset; importable by the workers that serve them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RECORDS = 24
X = np.arange(RECORDS * 4, dtype=np.float32).reshape(RECORDS, 4)
WORDS = [b"w%d\0" % number for number in range(RECORDS)]
LABELS = np.arange(RECORDS) % 4
SAMPLES = [
    {"x": row, "word": word, "label": int(label)}
    for row, word, label in zip(X, WORDS, LABELS, strict=True)
]


class Dicts:
    """A dataset of dicts, as for torch."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, number: int) -> Any:
        return SAMPLES[number]


class Tuples(Dicts):
    def __getitem__(self, number: int) -> Any:
        return tuple(SAMPLES[number].values())


class Together:
    """A dataset that gives many items at once, and no single item."""

    __len__ = Dicts.__len__

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [SAMPLES[number] for number in numbers]


def of_arrays(folder: Path) -> Any:
    return {"x": X, "word": WORDS, "label": LABELS}


def of_mapped(folder: Path) -> Any:
    np.save(folder / "x.npy", X)
    return of_arrays(folder) | {"x": np.load(folder / "x.npy", mmap_mode="r")}


def of_tensors(folder: Path) -> Any:
    import torch

    return of_arrays(folder) | {"x": torch.from_numpy(X)}


def of_tensor_tuples(folder: Path) -> Any:
    import torch

    class Set(torch.utils.data.Dataset[Any]):
        __len__ = Dicts.__len__

        def __getitem__(self, number: int) -> Any:
            return torch.from_numpy(X)[number], WORDS[number], torch.tensor(LABELS[number])

    return Set()


def of_table(folder: Path) -> Any:
    import pyarrow

    return pyarrow.table({"x": list(X), "word": WORDS, "label": LABELS})


def of_hugging_face(folder: Path) -> Any:
    import datasets

    features = {"x": datasets.List(datasets.Value("float32")), "word": datasets.Value("binary")}
    features["label"] = datasets.Value("int64")
    rows = {"x": list(X), "word": WORDS, "label": LABELS}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def of_hugging_face_arrays(folder: Path) -> Any:
    return of_hugging_face(folder).with_format("numpy", columns=["x"], output_all_columns=True)


KINDS: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "arrays": (of_arrays, None),
    "mapped arrays": (of_mapped, None),
    "dicts": (lambda folder: SAMPLES, None),
    "a dataset": (lambda folder: Dicts(), None),
    "many items at once": (lambda folder: Together(), None),
    "tuples": (lambda folder: Tuples(), ("x", "word", "label")),
}
FRAMEWORKS: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "tensors": (of_tensors, None),
    "a dataset of torch": (of_tensor_tuples, ("x", "word", "label")),
    "pyarrow": (of_table, None),
    "Hugging Face": (of_hugging_face, None),
    "Hugging Face, as arrays": (of_hugging_face_arrays, None),
}


class Once(Dicts):
    """A dataset for one thread at a time, which counts how many are inside."""

    def __init__(self) -> None:
        self.inside = self.most = 0

    def __getitem__(self, number: int) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.number = number
        time.sleep(0.002)
        self.inside -= 1
        return SAMPLES[self.number]


class Buffered:
    """A dataset that gives columns, and uses their memory again."""

    column_names = ("row",)

    def __init__(self, x: Any) -> None:
        self.x, self.buffer = x, np.zeros_like(x)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, numbers: Any) -> Any:
        return {"row": np.take(self.x, numbers, 0, self.buffer[: len(numbers)], mode="clip")}


class Flipped(Dicts):
    """A dataset that augments: one flip in two."""

    def __getitem__(self, number: int) -> Any:
        row = SAMPLES[number]["x"]
        return {"x": row[::-1] if np.random.random() < 0.5 else row}


class Numbers:
    """Record number n says that it is n."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"number": int(number)}
