"""The PyTorch backend: the only package here that imports torch.

`TorchLoader` (loader.py) is what a training loop iterates over. It drives a real
`torch.utils.data.DataLoader` with a `RecordDataset` and a `RequestSampler` (dataset.py), and puts
the batches on to the device ahead of the step (device.py).
"""

from twinfeed.loaders.torch.dataset import RecordDataset, RequestSampler, as_tensors
from twinfeed.loaders.torch.loader import TorchLoader

__all__ = ["RecordDataset", "RequestSampler", "TorchLoader", "as_tensors"]
