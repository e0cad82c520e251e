"""What the options of torch's DataLoader and of tf.data are called here, or where they are."""

from __future__ import annotations

_BATCHES = "the feed's sampler has it, as in Feed(index, BatchSampler(order, batch_size=…"
_SHUFFLE = "the feed's sampler shuffles, as in BatchSampler(RandomSampler(n, seed=0), batch_size=…)"
_COLLATE = (
    "the feed has it: collate= says how fields become a batch, batch_transform= changes the batch"
)
_SEED = "the sampler of the feed has the seed: seed="
_SAMPLER = "the feed has it: Feed(index, sampler)"

OF_FEEDS = {
    "batch_size": f"{_BATCHES}))",
    "collate_fn": _COLLATE,
    "drop_last": f"{_BATCHES}, last_batch='drop'))",
    "drop_remainder": f"{_BATCHES}, last_batch='drop'))",
    "generator": _SEED,
    "shuffle": _SHUFFLE,
}
"""Options of other libraries' loaders that a feed, or its sampler, has here."""

OF_LOADERS = {
    **OF_FEEDS,
    "batch_sampler": _SAMPLER,
    "buffer_size": "prefetch= is the number of batches ahead; a sampler shuffles without a buffer",
    "num_parallel_calls": "threads= is the number of threads that make batches",
    "sampler": _SAMPLER,
    "seed": _SEED,
    "transform": "the feed has it: Feed(…, transform=…)",
}
"""The same, and what other libraries' loaders take that is given to a `Feed` here."""

OF_PROCESSES = {
    "num_workers": "threads= is the number of threads that make batches; TorchLoader has processes",
    "pin_memory": "leave it out, or name the device= that batches go to",
}
"""Options of torch's DataLoader that only a `TorchLoader` can have."""

PINNED = {
    "pin_memory": "leave it out: where device= is a GPU, batches come through pinned memory",
    "pin_memory_device": "leave it out: device= names the GPU that batches go to",
}
"""Options of torch's DataLoader that a `TorchLoader` needs no more."""

_LOADERS = "the loader has it, as in TorchLoader(feed, {}=…)"
OF_A_FEED = OF_FEEDS | {
    name: _LOADERS.format(name) for name in ("device", "num_workers", "prefetch", "threads")
}
"""What a `Feed` does not take."""

_BLOCKS = "it follows from memory=, the bytes of the open blocks; ShardShuffleSampler takes it"
OF_SHUFFLED = {
    "batch_size": "BatchSampler has it, as in BatchSampler(shuffled(index, seed=0), batch_size=…)",
    "block": _BLOCKS,
    "buffer_size": "memory= is the number of bytes of the open blocks, 512 MiB by default",
    "window": _BLOCKS,
}
"""What other shuffles take that `shuffled` finds by itself."""

OF_DECODE_IMAGE = {
    "channels_first": "images are [height, width, channel]: batch['image'].permute(0, 3, 1, 2)",
}
"""What other decoders of images take that is done to a batch here."""
