"""Hints for options of torch's DataLoader and of tf.data: what each is called here."""

_DROP_LAST = "the sampler has it, as in BatchSampler(sampler, batch_size=32, last_batch='drop')"
_FEED = "the feed has it: Feed(index, sampler)"
_LOADER = "the loader has it, as in TorchLoader(feed, {})"
_SEED = "the sampler has it, as in RandomSampler(dataset, seed=0)"

OPTION_HINTS = {
    "batch_sampler": _FEED,
    "batch_size": "the sampler has it, as in BatchSampler(sampler, batch_size=32)",
    "collate_fn": "the feed has it: collate= for fields, batch_transform= for a whole batch",
    "device": _LOADER.format("device='cuda'"),
    "drop_last": _DROP_LAST,
    "drop_remainder": _DROP_LAST,
    "generator": _SEED,
    "num_workers": "TorchLoader(feed, num_workers=4) has processes, other loaders have threads=",
    "pin_memory": "leave it out: batches come through pinned memory where device= is a GPU",
    "prefetch": _LOADER.format("prefetch=2"),
    "sampler": _FEED,
    "seed": _SEED,
    "shuffle": (
        "the sampler shuffles, as in BatchSampler(RandomSampler(dataset, seed=0), batch_size=32)"
    ),
    "threads": _LOADER.format("threads=4"),
    "transform": "the feed has it: Feed(index, sampler, transform=…)",
}
"""Hints by name, for `show_call`."""
