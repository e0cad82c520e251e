"""`JaxLoader`: batches are global arrays, of which each process makes the rows of its devices."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import jax
import numpy as np

from twinfeed.loaders.batches.feed import Feed, recipe_of, require_feed
from twinfeed.loaders.batches.prefetch import Prefetcher
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.feed.collate import is_string, mode_of
from twinfeed.loaders.loop.feed_loader import ThreadedLoader
from twinfeed.loaders.loop.loader import B
from twinfeed.loaders.support.array_types import Array
from twinfeed.samplers import validate


class JaxLoader(ThreadedLoader[B]):
    """Iterate over the batches of the whole `feed` as global arrays of JAX.

    Every process gives the whole feed. Which rows a process makes follows from the sharding, and
    not from a rank. So the stream, and a state, are the same for any number of processes.

    Numbers go to the devices. `id`, strings and ragged fields stay on the host, and hold the rows
    of this process. Without `jax_enable_x64`, JAX has no 64-bit numbers: integers become 32-bit if
    every value fits, and are refused otherwise; float64 becomes float32.

    Where a pass begins, and what the state counts: see `Loader`. With a `sharding`, `copy.copy` is
    the only copy, as devices do not pickle.

    Args:
        feed: what is fed, for all processes: not one rank of `shard`.
        sharding: how batches lie on devices, such as `NamedSharding(mesh, PartitionSpec("data"))`.
            Only the first axis may be cut. Default: the first device, in one process.
        prefetch: batches kept ready on the devices. With 0, the calling thread does all work.
        threads: threads that make one batch each. Default: the processors this process may use, at
            most 8; no threads if nothing is decoded.
        readahead: bytes to read before their batches need them, as in `NumpyLoader`.

    Raises:
        ValueError: the sharding does not divide every batch, cuts another axis, or gives this
            process rows that do not lie side by side; the feed is one rank's. When a pass begins:
            a field is padded, and several processes would give it several lengths.

    >>> from tempfile import mkdtemp
    >>> import numpy as np
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.samplers import BatchSampler, RandomSampler
    >>> index = pack([{"x": np.float32(n)} for n in range(4)], mkdtemp())["data"]
    >>> sampler = BatchSampler(RandomSampler(4, seed=0), batch_size=2)
    >>> with JaxLoader(Feed(index, sampler)) as loader:
    ...     for batch in loader:
    ...         print(batch["id"], batch["x"])
    [0 2] [0. 2.]
    [1 3] [1. 3.]
    """

    # Devices cannot be copied: with a sharding, `copy.copy` works, but no pickle.
    _shared = (*ThreadedLoader._shared, "_user_sharding")

    @validate.show_call("JaxLoader(feed)")
    def __init__(
        self,
        feed: Feed,
        *,
        sharding: jax.sharding.Sharding | None = None,
        prefetch: int = 2,
        threads: int | None = None,
        readahead: int | None = None,
    ) -> None:
        if require_feed(feed).sampler.world_size > 1:
            raise ValueError("give the whole feed, not a rank of shard: the sharding has the rows")
        if sharding is None and jax.process_count() > 1:
            raise ValueError("sharding must be given where several processes train together")
        self._user_sharding = sharding
        # Each of `_num_parts` processes makes a part of each batch: the rows on its devices.
        part, self._num_parts = _part_of_process(self.sharding, feed)
        own_feed = feed.shard(part, self._num_parts) if self._num_parts > 1 else feed
        super().__init__(own_feed, prefetch=prefetch, threads=threads, readahead=readahead)

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding of batches over devices."""
        if self._user_sharding is None:
            return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return self._user_sharding

    def _start_pass(
        self, epoch: int, start: int
    ) -> Prefetcher[Batch] | Generator[Batch, None, None]:
        """Start to make the batches of an epoch, from step `start` on, as global arrays."""
        if self._num_parts > 1:
            self._check_equal_lengths()
        to_devices = partial(_to_devices, self.sharding, self._num_parts)
        return self._prefetched(self._batches(epoch, start, to_devices))

    def _check_equal_lengths(self) -> None:
        """Raise ValueError if the length of a field may differ between the processes."""
        # The shape and dtype of each field of a sample, where a length that differs is None; and
        # how each field is collated.
        spec, collate = recipe_of(self.feed).shapes
        for name, field in spec.items():
            mode = mode_of(collate, name)
            is_padded = mode == "pad" and len(field.shape) > 0  # to the longest of a batch
            is_stacked_by_length = mode == "stack" and None in field.shape
            if (is_padded or is_stacked_by_length) and not is_string(field.dtype):
                raise ValueError(
                    f"{name!r} may have another length in each process, and the parts of a global "
                    f"array need the same: make lengths equal in decode, or collate with 'ragged'"
                )


def _to_devices(sharding: jax.sharding.Sharding, num_parts: int, batch: Batch) -> Batch:
    """Replace the numeric arrays of a batch, but not "id", by global arrays on the devices."""
    arrays = dict(batch)
    for name, value in batch.items():
        if isinstance(value, np.ndarray) and value.dtype != object and name != "id":
            arrays[name] = _global_array(sharding, num_parts, name, value)
    return arrays


def _global_array(
    sharding: jax.sharding.Sharding, num_parts: int, name: str, rows: Array
) -> jax.Array:
    """Return a global array, of which each process gives its own `rows`."""
    dtype = jax.dtypes.canonicalize_dtype(rows.dtype)
    if dtype.kind in "iu" and dtype != rows.dtype and rows.size:
        limits = np.iinfo(dtype)
        for value in (rows.min(), rows.max()):
            if not limits.min <= value <= limits.max:
                raise LoaderError(
                    f"{name!r} holds {value}, and JAX has integers of 32 bits",
                    advice='jax.config.update("jax_enable_x64", True), or leave the field out',
                )
    shape = (len(rows) * num_parts, *rows.shape[1:])
    array: jax.Array = jax.make_array_from_process_local_data(  # type: ignore[no-untyped-call]
        sharding, rows.astype(dtype, copy=False), shape
    )
    return array


def _part_of_process(sharding: jax.sharding.Sharding, feed: Feed) -> tuple[int, int]:
    """Return which part of each batch this process makes: (number of the part, number of parts)."""
    num_devices = len(sharding.device_set)  # 8 in the example
    try:
        # The number of parts into which the sharding divides the first axis: 8, if each device has
        # a row of its own; or fewer, if several devices have copies of the same rows.
        cuts = num_devices // sharding.shard_shape((num_devices,))[0]
        slices = sharding.addressable_devices_indices_map((num_devices,)).values()
    except (IndexError, ValueError) as error:
        raise ValueError(f"sharding must cut only the first axis, got {sharding}") from error
    if feed.sampler.size_divisor % cuts:
        raise ValueError(
            f"the sharding cuts each batch into {cuts} equal parts, and {feed.sampler!r} has "
            f"batches of other sizes: give last_batch='pad', or a batch size that {cuts} divides"
        )
    # `slices` has a tuple of slices for each device of this process: the rows are {4, 5, 6, 7}.
    rows = {row for index in slices if index for row in range(num_devices)[index[0]]}
    first, count = min(rows), len(rows)
    are_consecutive = max(rows) - first + 1 == count
    # They must be one of several equal parts of the array: of 8 rows, 4 to 7 are the second half.
    # But 2 to 5 are not a half (2 % 4 is not 0), and 3 rows are not an equal part (8 % 3 is not 0).
    if not are_consecutive or first % count != 0 or num_devices % count != 0:
        raise ValueError(
            f"the devices of a process must have consecutive rows, got rows {sorted(rows)} of "
            f"{num_devices}: order the devices of the mesh by their process"
        )
    return first // count, num_devices // count  # (4 // 4, 8 // 4)
