"""Begin each Python that tests start: frameworks are imported in half the time.

Importing TensorFlow or torch makes a million objects that stay. Half the time of a short program
would go into looking for garbage among them again and again, and once more at its end.

TensorFlow and Keras try to import libraries that they can do without, which would take as long as
all the rest. They find none, as where only the backend's extra is installed.
"""

import gc
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def importing(*names: str) -> bool:
    """Whether any of these is being imported."""
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in names)
    return any(getattr(spec, "_initializing", False) for spec in specs)


def freeze_imported(phase: str, info: dict[str, int]) -> None:
    """Leave all objects out of later collections while a framework is being imported."""
    if phase == "stop" and importing("jax", "keras", "lightning", "tensorflow", "torch"):
        gc.freeze()


class Absent:
    """Find, for a framework that is being imported, what it can do without, and fail to load it."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        wanted = name in OPTIONAL and name != os.environ.get("KERAS_BACKEND")
        wanted = wanted and importing("tensorflow", "keras")
        return ModuleSpec(name, Absent) if wanted else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Make the usual module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        name = module.__name__
        raise ModuleNotFoundError(f"left out to save time: {name}", name=name)


OPTIONAL = {"jax", "matplotlib", "sklearn"}
sys.meta_path.insert(0, Absent)  # type: ignore[arg-type]
gc.set_threshold(20_000)
gc.callbacks.append(freeze_imported)
