"""Begin each Python that tests start: look for garbage seldom, and never among what imports made.

Importing TensorFlow or torch makes a million objects that stay. Half the time of a short program
would go into looking at them again and again, and once more at its end.
"""

import gc
import sys


def freeze_imported(phase: str, info: dict[str, int]) -> None:
    """Leave all objects out of later collections while a framework is being imported."""
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in FRAMEWORKS)
    if phase == "stop" and any(getattr(spec, "_initializing", False) for spec in specs):
        gc.freeze()


FRAMEWORKS = ("jax", "keras", "lightning", "tensorflow", "torch", "transformers")
gc.set_threshold(20_000)
gc.callbacks.append(freeze_imported)
