"""One seed, one stream of batches: the same records, in the same order, in every framework.

The names of a training are here, and are imported when they are used: `from twinfeed import
TorchLoader` imports torch, `from twinfeed import *` no framework. `twinfeed.samplers` decides which
records make the next batch, and `twinfeed.loaders` brings the records to a training loop. These two
have the types of results and arguments too, and `twinfeed.testing` has tests of what you write.

>>> from twinfeed import ExactOnceBatchSampler
>>> list(ExactOnceBatchSampler(5, batch_size=2))
[[0, 1], [2, 3], [4]]
"""

from twinfeed.lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
