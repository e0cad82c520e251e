"""Measure what the first batch of a fresh process costs, beside the import of its framework.

Each way is a process that imports its framework, takes a first batch from what the framework itself
has, imports twinfeed, opens an index, makes a feed of 64 random records, and takes a first batch of
it. All seconds are of the process's own time, so that neighbours disturb less.

The records are 1,000 zeros, in sparse files. The index of 10^8 records takes 2 GB on the disk.

    python benchmarks/first_batch.py --rounds 3
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from ways import Ways, main

BATCH, NBYTES, SHARDS = 64, 1000, 100
RECORDS = {"10^3": 10**3, "10^6": 10**6, "10^8": 10**8}
FOLDER = "TWINFEED_FIRST_BATCH"  # the environment variable that names the folder of the indexes
LOADERS = {
    "numpy": "NumpyLoader",
    "torch": "TorchLoader",
    "tensorflow": "TensorFlowLoader",
    "jax": "JaxLoader",
}


def write_index(folder: Path, records: int) -> None:
    """Write an index of sparse shards, whose records hold zeros."""
    import numpy as np

    from twinfeed.loaders import IndexOptions
    from twinfeed.loaders.building.writer import index_writer
    from twinfeed.loaders.index.arrays import StringColumn, row_type
    from twinfeed.loaders.index.index import SHARD
    from twinfeed.loaders.support.checksum import crc32c
    from twinfeed.loaders.support.temporary import temporary_folder

    folder.mkdir()
    per_shard = records // SHARDS
    names = [f"{shard:03d}.tar" for shard in range(SHARDS)]
    for name in names:
        with open(folder / name, "wb") as file:
            file.truncate(per_shard * NBYTES)
    shards = np.zeros(SHARDS, SHARD)
    shards["bytes"] = per_shard * NBYTES
    rows = np.zeros(records, row_type(per_shard * NBYTES, NBYTES, whole_files=False))
    rows["offset"] = np.arange(records) % per_shard * NBYTES
    rows["length"], rows["crc"] = NBYTES, crc32c(bytes(NBYTES))
    arrays = {
        "shards": shards,
        "shardstops": np.arange(1, SHARDS + 1) * per_shard,
        "shardlengths": np.full(SHARDS, per_shard),
        "field-0": rows,
        "column-0": np.arange(records) % 1000,
        **StringColumn.of(names).arrays("shardpaths"),
    }
    facts: dict[str, Any] = {
        "container": "tar",
        "records": records,
        "columns": ["label"],
        "fields": [{"name": "image", "kind": "bytes", "missing": 0}],
        "digests": {},
        "class_order": None,
    }
    path = folder / "all.index"
    with temporary_folder(path) as work, index_writer(path, work) as store:
        store.add(arrays)
        store.finish(facts, vars(IndexOptions(container="tar")))


def framework_batch(framework: str) -> None:
    """Import a framework, and take a first batch by what the framework itself has."""
    if framework == "numpy":
        import numpy as np

        np.zeros((BATCH, NBYTES))
    elif framework == "torch":
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        next(iter(DataLoader(TensorDataset(torch.zeros(BATCH, NBYTES)), BATCH)))
    elif framework == "tensorflow":
        import tensorflow as tf

        next(iter(tf.data.Dataset.from_tensor_slices(tf.zeros([BATCH, NBYTES])).batch(BATCH)))
    else:
        import jax

        jax.device_put(jax.numpy.zeros((BATCH, NBYTES))).block_until_ready()


def first_batch(framework: str, records: str) -> dict[str, float]:
    """Return the seconds of processor time of each part, in this process."""
    times = [time.process_time()]

    def since_last() -> float:
        times.append(time.process_time())
        return times[-1] - times[-2]

    __import__(framework)
    imported = since_last()
    framework_batch(framework)
    own_batch = since_last()
    import twinfeed

    make_loader = getattr(twinfeed, LOADERS[framework])
    import_twinfeed = since_last()
    index = twinfeed.open_index(Path(os.environ[FOLDER], records, "all.index"))
    order = twinfeed.RandomSampler(len(index), seed=0)
    loader = make_loader(twinfeed.Feed(index, twinfeed.BatchSampler(order, batch_size=BATCH)))
    next(iter(loader))
    batch = since_last()
    return {
        "framework's import s": imported,
        "its own first batch s": own_batch,
        "twinfeed's import s": import_twinfeed,
        "index, feed, loader, batch s": batch,
        "all, of import and own batch": (times[-1] - times[0]) / (imported + own_batch),
    }


WAYS: Ways = {
    f"{framework}, {records} records": (partial(first_batch, framework, records), framework)
    for framework in LOADERS
    for records in RECORDS
}


if __name__ == "__main__":
    if FOLDER in os.environ:
        main(__file__, __doc__, WAYS)
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        for name, records in RECORDS.items():
            write_index(Path(folder, name), records)
        os.environ[FOLDER] = folder
        main(__file__, __doc__, WAYS)
