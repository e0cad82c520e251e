"""The TensorFlow backend: the only package here that imports tensorflow.

`TensorFlowLoader` (loader.py) iterates over a feed, and gives a `tf.data.Dataset` for `model.fit`,
for `map` and for `tf.distribute`. `prefetch_to_device` (device.py) is the last step of what is made
of the dataset. `original_errors` (original.py) raises the errors of a pipeline as they are.
`twinfeed.loaders.keras` resumes `fit` at any step.

`choose` (choosing.py) lets a sampler choose from datasets: of the user's own, or those that
`source_datasets` (feed_datasets.py) makes of a feed.

How a dataset is made:

- _datasets.py has the base class of the loaders. _operators.py says whether a position is known,
  and _processes.py how many processes train.
- _pipeline.py makes the dataset of a `GraphSource`: a `BatchSource` (_batch_source.py), whose
  batches _layout.py turns into tensors, or a source of choosing.py.
- _callbacks.py lets TensorFlow call Python, and _iterators.py destroys iterators.
"""

from twinfeed.loaders.support.extras import requires_extra

with requires_extra("twinfeed.loaders.tensorflow", "tensorflow"):
    from twinfeed.loaders.tensorflow import _processes as _processes
    from twinfeed.loaders.tensorflow.choosing import choose
    from twinfeed.loaders.tensorflow.device import prefetch_to_device
    from twinfeed.loaders.tensorflow.feed_datasets import source_datasets
    from twinfeed.loaders.tensorflow.loader import TensorFlowLoader
    from twinfeed.loaders.tensorflow.original import original_errors

__all__ = [
    "TensorFlowLoader",
    "choose",
    "original_errors",
    "prefetch_to_device",
    "source_datasets",
]
