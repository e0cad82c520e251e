"""Read and restore the state of a model, and compare a model with a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np

from twinfeed.loaders.support.array_types import Array


def check_model(model: object) -> keras.Model:
    """Return `model`; raise TypeError unless it is of Keras 3, as one of `tf_keras` is not."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"ResumeCallback trains models of Keras 3, got {type(model).__module__}."
            f"{type(model).__name__}: for Keras 2, call model.fit(loader.dataset.map(…)), and save "
            f"the loader's position by tf.train.Checkpoint(model=model, loader=loader)"
        )
    return model


def optimizer_of(model: keras.Model) -> Any:
    """Return the optimizer of a compiled model, whose variables are built if they are not yet."""
    optimizer = getattr(check_model(model), "optimizer", None)
    if optimizer is None:
        raise ValueError("the model must be compiled before restore, which loads its optimizer")
    if not optimizer.built:
        strategy = getattr(model, "_distribute_strategy", None)
        with nullcontext() if strategy is None else strategy.scope():
            optimizer.build(model.trainable_variables)  # Keras only loads variables that exist
    return optimizer


def describe_optimizer(optimizer: Any) -> str:
    """Return the class and the number of variables of an optimizer: Adam(6 variables)."""
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = getattr(optimizer, "optimizers", ()) if inner is None else (inner,)
    text = ", ".join(map(describe_optimizer, parts)) or f"{len(optimizer.variables)} variables"
    return f"{type(optimizer).__name__}({text})"


def describe(model: keras.Model) -> list[list[str]]:
    """Return the path and the shape of each weight, the optimizer, and the random states."""
    shapes = [[weight.path, str(tuple(weight.shape))] for weight in model.weights]
    random = ["random layers", f"of {len(random_states(model))} states"]
    return [*shapes, ["optimizer", describe_optimizer(optimizer_of(model))], random]


def first_difference(model: keras.Model, saved: Sequence[Sequence[str]]) -> str:
    """Return the first difference between a model and the saved description of one, or ""; the
    paths of a second model of one process differ, and are not compared.
    """
    # If one has more weights, its next weight is compared with the optimizer of the other.
    for (path, here), (saved_path, there) in zip(describe(model), saved, strict=False):
        if here != there:
            return f"it has {saved_path} {there} where this model has {path} {here}"
    return ""


def learning_rates(optimizer: Any) -> list[keras.Variable]:
    """Return the learning rates, of an optimizer or of those it contains, that are no schedules."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    rates = [part.learning_rate for part in getattr(optimizer, "optimizers", (optimizer,))]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


def random_states(model: keras.Model) -> list[keras.Variable]:
    """Return the random states of layers such as Dropout: all variables that are not weights."""
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def to_numpy(variables: Iterable[Any]) -> list[Array]:
    """Return the values of variables as numpy arrays."""
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assign(variables: Sequence[keras.Variable], saved: Sequence[Any]) -> None:
    """Assign a saved value to each variable, unless there are more or fewer values."""
    if len(variables) == len(saved):
        for variable, value in zip(variables, saved, strict=True):
            variable.assign(value)


def is_finite(model: keras.Model, logs: dict[str, Any] | None) -> bool:
    """Return whether the loss in `logs` and all trainable weights are finite numbers."""
    if not math.isfinite((logs or {}).get("loss", 0.0)):
        return False
    weights = model.trainable_variables
    return all(bool(keras.ops.all(keras.ops.isfinite(weight))) for weight in weights)
