"""The TensorFlow backend: the only package here that imports tensorflow.

`TensorFlowLoader` (loader.py) carries a feed to a loop, and gives a `tf.data.Dataset` for
`model.fit`, for `map` and for `tf.distribute`. `prefetch_to_device` (device.py) is the last step of
what is made of the dataset. `original_errors` (errors.py) raises what was raised within a pipeline.
`twinfeed.loaders.keras` resumes `fit` at any step.

How a dataset is made:

- _pipeline.py is the frame, in which an engine gives the batches of a pass: _gather.py, _choose.py,
  or for TFRecord files _files.py with _fields.py and _runs.py.
- _serve.py reads a batch, and _layout.py hands the batch over to TensorFlow.
- _calls.py lets TensorFlow call all of them.
"""

from twinfeed.loaders.tensorflow.device import prefetch_to_device
from twinfeed.loaders.tensorflow.errors import original_errors
from twinfeed.loaders.tensorflow.loader import TensorFlowLoader

__all__ = ["TensorFlowLoader", "original_errors", "prefetch_to_device"]
