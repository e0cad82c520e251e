"""The device that batches are copied to."""

from __future__ import annotations

import tensorflow as tf


def prefetch_to_device(
    dataset: tf.data.Dataset, /, *, device: str | None = None, prefetch: int = 2
) -> tf.data.Dataset:
    """Keep `prefetch` batches ready on `device`; the last step of a pipeline, after every `map`.

    Strings have no place on a GPU: TensorFlow leaves them on the host. The length is kept.

    Args:
        dataset: the pipeline.
        device: a name such as "/GPU:0" or "gpu"; by default the first GPU that TensorFlow sees,
            else the CPU.
        prefetch: the number of batches.

    Raises:
        ValueError: a device that TensorFlow does not see.

    >>> dataset = prefetch_to_device(tf.data.Dataset.range(2), device="/CPU:0")
    >>> len(dataset), next(iter(dataset)).device
    (2, '/job:localhost/replica:0/task:0/device:CPU:0')
    """
    length = dataset.cardinality()
    copy = tf.data.experimental.prefetch_to_device(chosen_device(device), prefetch)
    copied = dataset.apply(copy)
    # The copy hides the length. An op that asserts the length would fetch everything back.
    copied.cardinality = lambda: length
    return copied


def chosen_device(device: str | None, /) -> str:
    """Return the device, or a default for None; raise ValueError for a device that is not seen."""
    full_names = [logical.name for logical in tf.config.list_logical_devices()]
    names = ["/" + name.rpartition("/")[2].removeprefix("device:") for name in full_names]
    if device is None:
        return next((name for name in names if name.startswith("/GPU")), "/CPU:0")
    # As TensorFlow, take "CPU:0", "cpu:0" and "/device:CPU:0" too, and as torch "cpu".
    name = "/" + str(device).lstrip("/").removeprefix("device:").upper()
    name = name if ":" in name else f"{name}:0"
    if name not in names:
        raise ValueError(f"device must be one that TensorFlow sees, {names}, got {device!r}")
    return name
