"""A Grain dataset of one's own in the order of a sampler, with workers, stopped and resumed."""

from __future__ import annotations

import grain
import numpy as np
from absl import flags
from same_ids import report

from twinfeed import BatchSampler, IdSequence, RandomSampler

RECORDS = [{"id": n, "x": np.float32(n)} for n in range(680)]
SAMPLER = RandomSampler(680, seed=0)


def batches(workers: int) -> grain.IterDataset:
    """Return batches of the records of 90 epochs, one epoch after the other."""
    ids = IdSequence(SAMPLER, epochs=90)
    dataset = grain.MapDataset.source(ids).map(RECORDS.__getitem__).batch(32)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    processes = grain.MultiprocessingOptions(num_workers=workers)
    return dataset.to_iter_dataset(options).mp_prefetch(processes)


def run(workers: int) -> None:
    """Take batches, stop, and go on with other iterators from the state."""
    iterator = iter(batches(workers))
    delivered = [next(iterator)["id"] for _ in range(31)]
    state = iterator.get_state()

    resumed = iter(batches(workers))  # in another process
    resumed.set_state(state)
    delivered += [next(resumed)["id"] for _ in range(30)]
    report(delivered, BatchSampler(SAMPLER, batch_size=32))


if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()  # for Grain's workers, outside absl.app.run
    run(workers=0)
    run(workers=2)
