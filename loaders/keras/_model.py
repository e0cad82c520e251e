"""Read and restore the state of a model, and compare a model with a save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import keras
import numpy as np

from twinfeed.loaders.support.array_types import Array


def optimizer_of(model: keras.Model) -> Any:
    """Return the built optimizer of a model.

    Raises:
        ValueError: a model that is not compiled.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ValueError(
            "the model must be compiled before restore, as its optimizer is restored too"
        )
    if not optimizer.built:
        strategy = getattr(model, "_distribute_strategy", None)
        with nullcontext() if strategy is None else strategy.scope():
            optimizer.build(model.trainable_variables)  # without it, Keras loads no variables
    return optimizer


def describe_optimizer(optimizer: Any) -> str:
    """Return the class of an optimizer and the number of its variables, as text.

    A save is compared by this text: Keras only warns if another optimizer's variables are loaded.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = getattr(optimizer, "optimizers", ()) if inner is None else (inner,)
    text = ", ".join(map(describe_optimizer, parts)) or f"{len(optimizer.variables)} variables"
    return f"{type(optimizer).__name__}({text})"


def weight_shapes(model: keras.Model) -> list[list[Any]]:
    """Return the path and the shape of each weight, for JSON."""
    return [[weight.path, list(weight.shape)] for weight in model.weights]


def describe_difference(model: keras.Model, saved: Sequence[Any]) -> str:
    """Return, as text, how the weights of a model differ from saved `weight_shapes`; "" if equal.

    Paths are not compared: in a second model of one process, Keras gives layers other names.
    """
    current = weight_shapes(model)
    for weight, saved_weight in zip_longest(current, saved, fillvalue=("nothing", None)):
        if weight[1] != saved_weight[1]:
            return (
                f"it has {len(saved)} weights, this model {len(current)}, of which "
                f"{_describe_weight(*weight)} is in the place of {_describe_weight(*saved_weight)}"
            )
    return ""


def _describe_weight(path: str, shape: Sequence[int] | None) -> str:
    return path if shape is None else f"{path} {tuple(shape)}"


def learning_rates(optimizer: Any) -> list[keras.Variable]:
    """Return the learning rates that callbacks may change. A schedule is a function of the step."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    rates = [part.learning_rate for part in getattr(optimizer, "optimizers", (optimizer,))]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


def random_states(model: keras.Model) -> list[keras.Variable]:
    """Return the states of the random layers, such as Dropout, which are no weights."""
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def to_numpy(variables: Iterable[Any]) -> list[Array]:
    """Return the values of variables."""
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def assign(variables: Sequence[keras.Variable], saved: Sequence[Any]) -> bool:
    """Assign a saved value to each variable; return False if there are more or fewer values."""
    if len(variables) != len(saved):
        return False
    for variable, value in zip(variables, saved, strict=True):
        variable.assign(value)
    return True


def is_finite(model: keras.Model, logs: dict[str, Any] | None) -> bool:
    """Return whether the loss and the trained weights are finite.

    A step with a finite loss may already have made a weight infinite or NaN.
    """
    if not math.isfinite((logs or {}).get("loss", 0.0)):
        return False
    weights = model.trainable_variables
    return all(bool(keras.ops.all(keras.ops.isfinite(weight))) for weight in weights)
