"""The backends of `compare`: the module of each loader, and how its batches become numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from twinfeed.loaders.feed.collate import Ragged
from twinfeed.loaders.support.array_types import as_array


class Backend(NamedTuple):
    """Say where the loader of a framework is, and how its batches become numpy.

    Nothing is imported before a process runs the backend.

    Attributes:
        module: the module that has the loader. It and `to_numpy` must be importable.
        loader: the name of the loader, which is made as in `NumpyLoader(feed)`.
        needs: the package that must be installed.
        options: what the loader is given, so that it runs on any machine.
        to_numpy: a function of one value of a batch, where `np.asarray` does not serve. Its result
            is an array, a list of strings, or a `Ragged`.

    >>> BACKENDS["torch"].loader
    'TorchLoader'
    """

    module: str
    loader: str
    needs: str = "numpy"
    options: Mapping[str, Any] = {}
    to_numpy: Callable[[Any], Any] | None = None


def to_ragged(value: Any) -> Any:
    """Convert a jagged tensor of torch, a `tf.RaggedTensor` or a list of lists of strings to a
    `Ragged`; rows with strides or gaps become a list. Any other value is returned as it is.
    """
    if getattr(value, "is_nested", False):
        value = value.detach().cpu()
        if not (hasattr(value, "offsets") and value.is_contiguous()):
            return [*value.unbind()]
        return Ragged(as_array(value.values()), value.offsets().diff().numpy())
    if isinstance(value, list) and any(isinstance(row, list) for row in value):
        lengths = np.array([len(row) for row in value], np.int64)
        return Ragged(np.array([*chain.from_iterable(value)], object), lengths)
    if hasattr(value, "row_lengths"):  # a tf.RaggedTensor
        return Ragged(value.values.numpy(), value.row_lengths().numpy())
    return value


BACKENDS = {
    "numpy": Backend("twinfeed.loaders", "NumpyLoader"),
    "torch": Backend(
        "twinfeed.loaders.torch", "TorchLoader", "torch", {"device": "cpu"}, to_ragged
    ),
    "tensorflow": Backend(
        "twinfeed.loaders.tensorflow",
        "TensorFlowLoader",
        "tensorflow",
        {"device": "/CPU:0"},
        to_ragged,
    ),
    "jax": Backend("twinfeed.loaders.jax", "JaxLoader", "jax"),
}
"""The backends by name. `BACKENDS["mine"] = Backend(…)` adds a backend to `compare`."""
