"""One seed, one stream of batches: the same records, in the same order, in every framework.

The names of everyday use are here. All names are in `twinfeed.samplers`, which says what records
make the next batch, and in `twinfeed.loaders`, which brings the records to a training loop. What
needs a framework is in `twinfeed.loaders.torch`, `.tensorflow`, `.keras`, `.jax` and `.grain`.
Nothing is imported before it is used.

>>> from twinfeed import ExactOnceBatchSampler
>>> [ids.tolist() for ids in ExactOnceBatchSampler(5, batch_size=2)]
[[0, 1], [2, 3], [4]]
"""

from twinfeed.lazy import attach

__version__ = "0.1.0"

__getattr__, __all__ = attach(__name__, __file__)
