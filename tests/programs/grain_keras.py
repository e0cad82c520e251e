"""A fit of Keras over Grain: its weights are those of the same batches in the same order.

KERAS_BACKEND=jax python grain_keras.py INDEX
"""

import sys

import grain
import keras
import numpy as np

from twinfeed.loaders import Feed, NumpyLoader, open_index
from twinfeed.loaders.grain import as_map_dataset
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, RandomSampler

index = open_index(sys.argv[1])
feed = Feed(index, BatchSampler(RandomSampler(len(index), seed=0), batch_size=8, last_batch="drop"))
options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


def pair(batch: dict) -> tuple:
    """Return inputs and targets."""
    return batch["x"], batch["y"][:, None]


model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
model.compile(keras.optimizers.SGD(0.05), "mse")
batches = as_map_dataset(feed, epochs=3, arrange=pair).to_iter_dataset(options)
model.fit(batches, epochs=3, steps_per_epoch=len(feed), verbose=0)

weights, bias, loader = np.zeros((3, 1)), np.zeros(1), NumpyLoader(feed)
for _ in range(3):
    for x, y in map(pair, loader):
        error = 2 * (x @ weights + bias - y) / len(x)
        weights, bias = weights - 0.05 * x.T @ error, bias - 0.05 * error.sum(0)
np.testing.assert_allclose(model.get_weights()[0], weights, rtol=1e-3)

whole = Feed(index, ExactOnceBatchSampler(len(index), batch_size=8))
exact = as_map_dataset(whole, epochs=1, arrange=pair).to_iter_dataset(options)
assert len(model.predict(exact, verbose=0)) == len(index)
print("the weights are equal")
