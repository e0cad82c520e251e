"""Iterators of TensorFlow that are destroyed in a thread without locks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from twinfeed.loaders.tensorflow._callbacks import drop

# As TensorFlow names the class of its iterators, which it does not export.
_Owned: Any = tf.data.IteratorSpec(tf.TensorSpec([])).value_type


class _Iterator(_Owned):
    def __del__(self) -> None:
        if "_iterator_resource" in self.__dict__:
            drop([self.__dict__.pop("_iterator_resource")])


class _Guarded(tf.data.Dataset):
    def __iter__(self) -> Any:
        return _Iterator(self) if tf.executing_eagerly() else super().__iter__()


def _passed_on(method: Callable[..., Any]) -> Callable[..., Any]:
    """Guard what a method of a dataset gives: `map` and `prefetch` make new datasets."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        return guarded(method(*args, **options))

    return call


for _name, _method in vars(tf.data.Dataset).items():
    if inspect.isfunction(_method) and not _name.startswith("_"):
        setattr(_Guarded, _name, _passed_on(_method))


@functools.cache
def _guarded_class(kind: Any) -> type:
    """Derive from a class of datasets. TensorFlow asks datasets for their class."""
    return type(kind.__name__, (_Guarded, kind), {"__module__": kind.__module__})


def guarded(dataset: Any, /) -> Any:
    """Let a dataset, and all that is made of it, give such iterators: a reading may fail."""
    if isinstance(dataset, tf.data.Dataset) and not isinstance(dataset, _Guarded):
        kind: Any = type(dataset)
        dataset.__class__ = _guarded_class(kind)
    return dataset
