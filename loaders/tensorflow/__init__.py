"""The TensorFlow backend: the only package here that imports tensorflow.

`make_dataset` (dataset.py) gives a `tf.data.Dataset` for `model.fit`, for loops of one's own and
for `tf.distribute`; `prefetch_to_device` (device.py) is its last step. `ResumeCallback` (keras.py)
resumes `fit`, `Position` (position.py) a loop of one's own, at any step. `original_errors`
(errors.py) raises what was raised within a pipeline, and `hide_gpus` (device.py) keeps TensorFlow
off the GPU.

How a dataset is made: pipeline.py is the frame, in which an engine gives the batches of an epoch
(gather.py; choose.py and, for TFRecord files, files.py and runs.py), passes.py says which epoch,
serve.py reads a batch, layout.py hands it over.
"""

from twinfeed.loaders.tensorflow.dataset import make_dataset
from twinfeed.loaders.tensorflow.device import hide_gpus, prefetch_to_device
from twinfeed.loaders.tensorflow.errors import original_errors
from twinfeed.loaders.tensorflow.keras import ResumeCallback
from twinfeed.loaders.tensorflow.position import Position

__all__ = [
    "Position",
    "ResumeCallback",
    "hide_gpus",
    "make_dataset",
    "original_errors",
    "prefetch_to_device",
]
