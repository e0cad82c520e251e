"""The module of a backend: functions look whether it has been imported."""

from twinfeed.loaders import NumpyLoader

__all__ = ["NumpyLoader"]
