"""Values of any structure as one opaque tensor."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def wrapped(value: Any) -> tf.Tensor:
    """Wrap tensors of any structure and shape into a scalar."""
    parts = tf.nest.flatten(value, expand_composites=True)
    return tf.raw_ops.OptionalFromValue(components=parts)


def unwrapped(scalar: tf.Tensor, spec: Any) -> Any:
    """Give the value that was wrapped; `spec` is its element spec."""
    flat = tf.nest.flatten(spec, expand_composites=True)
    parts = tf.raw_ops.OptionalGetValue(
        optional=scalar,
        output_types=[one.dtype for one in flat],
        output_shapes=[one.shape for one in flat],
    )
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)
