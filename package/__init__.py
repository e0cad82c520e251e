"""One seed, one stream of batches: the same records, in the same order, in TensorFlow and PyTorch.

The names of everyday use are here; all names are in `twinfeed.samplers`, which say what records
make the next batch, and `twinfeed.loaders`, which bring the records to a training loop. The loaders
of the frameworks are `twinfeed.loaders.torch`, `twinfeed.loaders.tensorflow` and
`twinfeed.loaders.keras`. Nothing is imported before it is used.

>>> from twinfeed import ExactOnceBatchSampler
>>> [ids.tolist() for ids in ExactOnceBatchSampler(5, batch_size=2)]
[[0, 1], [2, 3], [4]]
"""

from twinfeed.lazy import attach

__version__ = "0.1.0"

__getattr__, __all__ = attach(__name__, __file__)
