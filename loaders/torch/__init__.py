"""The PyTorch backend: the only package here that imports torch.

`TorchLoader` (loader.py) is what a training loop iterates over. It makes batches on threads, or by
a real `torch.utils.data.DataLoader` (_workers.py), and copies the batches to the device ahead of
the step (_copier.py). `RecordDataset`, `RequestSampler` and `TorchSampler` (dataset.py) are for a
`DataLoader` of your own, `exact_collate` (empty_batch.py) for an evaluation in one, and `ordered`
(_ordered.py) for a trainer that only takes a dataset. _sharing.py passes the tensors of a worker
on. process_groups.py runs samplers as ranks.
"""

from twinfeed.loaders.support.extras import requires_extra

with requires_extra("twinfeed.loaders.torch", "torch"):
    from twinfeed.loaders.torch._ordered import (
        EndlessSampler,
        Ordered,
        TorchDistributedSampler,
        ordered,
    )
    from twinfeed.loaders.torch.dataset import (
        RecordDataset,
        RequestSampler,
        TorchSampler,
        as_tensors,
    )
    from twinfeed.loaders.torch.empty_batch import exact_collate
    from twinfeed.loaders.torch.loader import TorchLoader

__all__ = [
    "EndlessSampler",
    "Ordered",
    "RecordDataset",
    "RequestSampler",
    "TorchDistributedSampler",
    "TorchLoader",
    "TorchSampler",
    "as_tensors",
    "exact_collate",
    "ordered",
]
