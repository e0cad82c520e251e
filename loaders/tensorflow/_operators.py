"""Datasets that know the operators which made them, and announce their passes to the loader."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import tensorflow as tf

from twinfeed.loaders.loop.loader import fields_named
from twinfeed.loaders.loop.uncounted import Announced, Asker, UncountedPasses, asker
from twinfeed.loaders.tensorflow._callbacks import drop

# The dataset that an operator gives has the same batches, in the same order, or the first of them.
_KEEPING = {"CopyToDevice", "Map", "Options", "Prefetch", "Repeat", "Take"}

_ADVICE = {
    **dict.fromkeys(
        ("cache", "snapshot"), "leave it out, as it gives the batches of one epoch again and again"
    ),
    "shuffle": "leave it out, as the sampler shuffles",
    "skip": "call load_state_dict or set_epoch instead, which move the position",
    "shard": "give the loader feed.shard(rank, world_size) instead",
    "zip": "add fields to the records by decode, transform or side= instead",
    **dict.fromkeys(
        ("batch", "unbatch", "rebatch", "padded_batch", "ragged_batch"),
        "set the batch_size of the sampler instead",
    ),
    **dict.fromkeys(("filter", "take_while"), "let the sampler choose the records instead"),
    **dict.fromkeys(("concatenate", "interleave"), "mix by a MixtureSampler instead"),
}

_UNORDERED = (
    "with deterministic=False, batches come in any order, so the position after them is not known: "
    "leave deterministic=False out of the pipeline and of its options"
)

# As TensorFlow names the class of its iterators, which it does not export.
_Owned: Any = tf.data.IteratorSpec(tf.TensorSpec([])).value_type


class _Operator(NamedTuple):
    """What TensorFlow calls a dataset, and the method that made it."""

    kind: str
    method: str


class LoaderDataset(tf.data.Dataset):
    """What is made of a loader's dataset, with the methods of its own class.

    Every dataset that a method gives is one too. An iterator announces its pass.
    """

    def __iter__(self) -> Any:
        if not tf.executing_eagerly():
            return super().__iter__()
        return iterator_of(self, asker())


def _followed(name: str) -> Callable[..., Any]:
    method = getattr(tf.data.Dataset, name)

    @functools.wraps(method)
    def call(self: LoaderDataset, *arguments: Any, **options: Any) -> Any:
        with fields_named(self.element_spec):
            made = followed(getattr(super(LoaderDataset, self), name)(*arguments, **options))
        if isinstance(made, LoaderDataset) and name != "apply":
            _name(made, self, name)
        return made

    return call


for _public in dir(tf.data.Dataset):
    if inspect.isfunction(inspect.getattr_static(tf.data.Dataset, _public)) and _public[0] != "_":
        setattr(LoaderDataset, _public, _followed(_public))


def followed(made: Any) -> Any:
    """Have a dataset that was made of a loader's dataset announce its passes."""
    plain = isinstance(made, tf.data.Dataset) and not isinstance(made, LoaderDataset)
    if plain and _way_to(made)[1]:
        kind: Any = type(made)
        made.__class__ = _class_of(kind)
    return made


def _name(made: tf.data.Dataset, source: tf.data.Dataset, method: str) -> None:
    """Note which method made all datasets between two. Some methods call others."""
    if made is not source:
        made.twinfeed_method = method
        for one in made._inputs():
            _name(one, source, method)


@functools.cache
def _class_of(kind: Any) -> type:
    """Add the methods of `LoaderDataset`. TensorFlow asks datasets for their class."""
    return type(kind.__name__, (LoaderDataset, kind), {"__module__": kind.__module__})


def _way_to(dataset: tf.data.Dataset) -> tuple[list[_Operator], set[UncountedPasses]]:
    """Return the operators between loaders and a dataset, the first one first, and the loaders."""
    engine = getattr(dataset, "twinfeed_engine", None)
    if engine is not None:
        return [], {engine.server.uncounted}
    ways = [way for way in map(_way_to, dataset._inputs()) if way[1]]
    if not ways:
        return [], set()
    kind = type(dataset).__name__.strip("_").removesuffix("Dataset").removeprefix("Parallel")
    if getattr(dataset, "_deterministic", None) == "false":
        kind = "Unordered"
    own = _Operator(kind, getattr(dataset, "twinfeed_method", kind))
    return [*chain(*(way[0] for way in ways)), own], set().union(*(way[1] for way in ways))


def _refused(dataset: tf.data.Dataset, operators: list[_Operator], loaders: int) -> str:
    """Say why the position is not known after the elements of a dataset, or nothing."""
    if loaders > 1:
        return (
            f"these batches come from {loaders} loaders, so no loader knows its position: give "
            f"each loader a pipeline of its own, or mix the records by a MixtureSampler"
        )
    kinds = [kind for kind, _ in operators]
    for number, (kind, method) in enumerate(operators):
        again = kind == "Repeat" and "Take" in kinds[:number]
        if kind == "Unordered" or (kind == "Map" and dataset.options().deterministic is False):
            return _UNORDERED
        if kind not in _KEEPING or again:
            return (
                f"dataset.{method}() {'after take() ' if again else ''}changes which batches come, "
                f"or their order, so the position after them is not known: "
                f"{_ADVICE.get(method, 'leave it out')}, or say order='mine' if each element is "
                f"the next batch of the loader all the same"
            )
    return ""


def loaders_of(dataset: Any) -> set[UncountedPasses]:
    """Return the loaders whose batches a dataset is made of, as far as this is known."""
    return _way_to(dataset)[1] if isinstance(dataset, LoaderDataset) else set()


def feed_of(dataset: Any) -> Any:
    """Return the feed whose batches a dataset is made of, or None if it is not known."""
    if hasattr(dataset, "twinfeed_engine"):
        return getattr(dataset.twinfeed_engine.server, "feed", None)
    inputs = dataset._inputs() if isinstance(dataset, LoaderDataset) else ()
    return next((feed for feed in map(feed_of, inputs) if feed is not None), None)


def iterator_of(dataset: Any, who: Asker) -> Any:
    """Make an iterator for somebody, or refuse somebody who could not know the position."""
    if not isinstance(dataset, LoaderDataset):
        return iter(dataset)
    operators, loaders = _way_to(dataset)
    refused = _refused(dataset, operators, len(loaders))
    repeats = any(kind == "Repeat" for kind, _ in operators)
    announced = {one: Announced(who, refused, repeats=repeats) for one in loaders}
    for passes, one in announced.items():
        passes.check(one)
    return _Iterator(dataset, announced)


class _Iterator(_Owned):
    """An iterator of TensorFlow that begins when it is first used.

    At the end of an epoch Keras makes an iterator that it does not use. The pass is announced at
    the first use, so that the next pass that begins is the announced one.
    """

    def __init__(
        self, dataset: tf.data.Dataset, announced: dict[UncountedPasses, Announced]
    ) -> None:
        self._announced = announced
        super().__init__(dataset)

    def __del__(self) -> None:
        if "_iterator_resource" in self.__dict__:
            drop([self.__dict__.pop("_iterator_resource")])

    def _create_iterator(self, dataset: tf.data.Dataset) -> None:
        self._dataset, self._element_spec = dataset, dataset.element_spec

    def __getattr__(self, name: str) -> Any:
        if name not in ("_iterator_resource", "_flat_output_types", "_flat_output_shapes"):
            raise AttributeError(f"an iterator has no attribute {name!r}")
        for passes, one in self._announced.items():
            passes.announce(one)
        variant = tf.data.experimental.to_variant(self._dataset)
        with tf.init_scope(), tf.device(variant.device):
            super()._create_iterator(self._dataset)
        return self.__dict__[name]
