"""What `Feed` refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.batches import made
from support.feeds import batch_of, request_of
from support.refusals import Call, Refused

from twinfeed.loaders import (
    ByRecord,
    DatasetSource,
    DecodeError,
    DecodeImage,
    Feed,
    FieldSpec,
    Index,
    Pad,
    Seeded,
    pack,
    plan,
    shuffled,
)
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    RandomSampler,
    SequentialSampler,
)

SAMPLER = ExactOnceBatchSampler(6, batch_size=4)


@pytest.mark.frameworks
def test_torch_side_table_is_refused(index: Index, sampler: ExactOnceBatchSampler) -> None:
    import torch

    with pytest.raises(TypeError, match="side table 'w' must be an array of numbers"):
        Feed(index, sampler, side={"w": torch.zeros(6)})  # type: ignore[dict-item]


# What is refused


def feed(at: int | None = None, *, of: Any = SAMPLER, **options: Any) -> Callable[[Index], object]:
    """Return what makes a feed of these options, and a batch of the record `at`."""

    def make(index: Index) -> object:
        feed = Feed(index, of, **options)
        if at is None:
            return feed
        return batch_of(feed, request_of(at - 1, at) if at else request_of(0))

    return make


def word_as_field_name(sample: dict[str, Any]) -> dict[str, Any]:
    return {sample["word"].decode(): 1}


def decoded_in_place(index: Index) -> object:
    decode = DecodeImage("jpg")
    spec = {"jpg": FieldSpec((2, 2, 3), np.dtype(np.uint8))}
    return feed(1, decode=decode, spec=spec)(index)


def none_for_or(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": None if sample["word"] == b"or" else 1}


def other_dtype_for_not(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full(2, 7, np.int64 if sample["word"] == b"not" else np.uint8)}


def shuffling(**options: Any) -> Callable[[Index], object]:
    return lambda index: shuffled(index, seed=0, **options)


GIVEN = ["id", "record", "view", "seed", "seed32"]

TABLE = {"word": np.arange(6)}

TAKEN = "has the name of a side table"

NAMES = {"id": SAMPLER, "mask": ExactOnceBatchSampler(6, batch_size=4, last_batch="pad")}

OF_BATCH = "has a name that the loader itself gives to every batch"

ARRAY = "side table 'w' must be an array of numbers or a list of str, got"

TEXTS = ["a", "", "ß", "\0", "🦉"]

MASKED = np.ma.array([*TEXTS, "f"], mask=[0, 0, 0, 1, 0, 0])

REFUSED: Refused = [
    (feed(of=ExactOnceBatchSampler(7, batch_size=2)), ValueError, "for 7 records, the index has 6"),
    (lambda _: Feed({"x": np.ones(7)}, SAMPLER), ValueError, "the dataset has 7: make the sampler"),
    (feed(of=RandomSampler(6, seed=0)), TypeError, "got a RandomSampler: BatchSampler"),
    (
        lambda i: setattr(feed()(i), "sampler", 0),
        AttributeError,
        "does not change: make another Feed",
    ),
    (plan, TypeError, r"feed must be Feed\(index, sampler\), got Index"),  # type: ignore[arg-type]
    (feed(fields=["zz"]), KeyError, "no field 'zz'"),
    (feed(fields="word"), TypeError, "fields must be a list of names, got 'word'"),
    *(
        row
        for name in ("decode", "transform")
        for row in (
            (feed(0, **{name: "jpg"}), DecodeError, f"{name} failed: TypeError.*not callable"),
            (feed(0, **{name: DecodeImage}), DecodeError, f"{name} failed: TypeError.*field must"),
            (
                feed(0, **{name: lambda _: {"x": None}}),  # at the trial, before any batch
                DecodeError,
                "record 0.*field 'x' holds a NoneType",
            ),
            (
                feed(2, **{name: none_for_or}),
                DecodeError,
                "record 2.*field 'x' holds a NoneType",
            ),
        )
    ),
    *((feed(**{n: [1]}), TypeError, rf"{n} must be a dict, got \[1\]") for n in ("side", "spec")),
    *(
        (feed(spec={"x": one}), TypeError, r"spec of 'x' must be like FieldSpec\(.*, got ")
        for one in (3, ((2,), "no dtype"), ((2,), np.int64, 1))
    ),
    *(
        (feed(side={"w": [*TEXTS, last]}), TypeError, rf"{ARRAY} a list whose row 5 is {shown}:")
        for last, shown in {None: "None", 1.5: "1.5", b"b": "b'b'", "\ud800": r"'\\ud800'"}.items()
    ),
    *(
        (feed(side={"w": table}), TypeError, f"{ARRAY} a {type(table).__name__} whose row 0 is ")
        for table in ("abcdef", [[text] for text in TEXTS], dict(enumerate(TEXTS)), [1, 2])
    ),
    (feed(side={"w": MASKED}), ValueError, "'w' must have no masked entry, got one at 3"),
    (feed(side={"w": TEXTS}), ValueError, "'w' has 5 rows, the sampler 6 sample ids.*ByRecord"),
    (feed(side={"w": ByRecord(TEXTS)}), ValueError, "'w' has 5 rows, the sampler 6 records"),
    (feed(side={"w": ByRecord([None])}), TypeError, ARRAY),
    (feed(side={"w": np.zeros(3)}), ValueError, "'w' has 3 rows, the sampler 6"),
    (feed(side={"w": np.zeros(7)}), ValueError, "'w' has 7 rows, the sampler 6"),
    (feed(side={"label": np.zeros(6)}), ValueError, "table 'label' has the name of a column"),
    (feed(side=TABLE), ValueError, f"field 'word' {TAKEN}"),
    (feed(0, decode=dict, side=TABLE), ValueError, f"'word' {TAKEN}"),
    (feed(0, decode=dict, transform=dict, side=TABLE), ValueError, f"'word' {TAKEN}"),
    (feed(0, collate={"wrod": "pad"}), ValueError, r"\['wrod'\], the fields are \['word'\]"),
    (feed(2, decode=word_as_field_name), DecodeError, r"record 2 .*\['or'\].*\['be'\]"),
    (
        lambda index: batch_of(Feed(index, SAMPLER, decode=word_as_field_name), request_of(2)),
        DecodeError,
        r"record 2 .*\['or'\] where \['to'\] are expected",
    ),
    (feed(0, decode=lambda _: None), DecodeError, "return a dict of fields, got a NoneType"),
    (
        feed(0, decode=lambda sample: {"x": sample["label"]}),
        DecodeError,
        r"\('label'\); .* \['word'\]",
    ),
    (decoded_in_place, DecodeError, r"KeyError\('jpg'\); it was given \['word'\]"),
    *(
        (
            feed(0, transform=lambda sample, name=name: sample | {name: 9}),
            DecodeError,
            f"record 0 .* changed '{name}': rename",
        )
        for name in GIVEN
    ),
    *(
        (
            feed(0, decode=lambda _, name=name: {name: 5}, transform=lambda sample: sample),
            ValueError,
            f"field '{name}' .* itself gives to every sample",
        )
        for name in GIVEN
    ),
    *(
        row
        for name, of in NAMES.items()
        for row in (
            (
                feed(0, of=of, decode=lambda _, name=name: {name: 5}),
                ValueError,
                f"^field {name!r} {OF_BATCH}: ",
            ),
            (feed(of=of, side={name: np.zeros(6)}), ValueError, f"^side table {name!r} {OF_BATCH}"),
        )
    ),
    (
        lambda index: next(made(Feed(index, SAMPLER, decode=lambda _: {"x": np.random.rand()}))),
        ValueError,
        r"^decode returned different results.*draw random numbers in transform",
    ),
    (lambda _: Seeded(dict, also=[3]), TypeError, "hold objects with set_random_seed, got 3"),  # type: ignore[list-item]
    (lambda index: Feed(index, SAMPLER)[-1, 0], IndexError, "epoch"),
    (lambda index: Feed(index, SAMPLER)[0, -1], IndexError, "epoch"),
    (lambda index: Feed(index, SAMPLER)[0, 2], IndexError, "epoch"),
    (lambda index: Feed(index, SAMPLER)[0, "2"], TypeError, "step must be an integer, got '2'"),  # type: ignore[index]
    (
        lambda index: next(iter(Feed(index, SAMPLER))),  # type: ignore[call-overload]
        TypeError,
        r"feed\[0, 0\] is the first batch of epoch 0, got feed\[0\]: iterate",
    ),
    (shuffling(memory=0), ValueError, "memory must be at least 1"),
    (shuffling(records=[6]), IndexError, "ids must lie in"),
    (shuffling(records=[1, 1]), ValueError, "records must differ"),
    (lambda _: DecodeImage(mode="CMYK"), ValueError, "one of 'RGB', 'L', got 'CMYK'"),  # type: ignore[arg-type]
    (lambda _: DecodeImage((64, 64)), TypeError, r"field, got \(64, 64\); size= resizes"),  # type: ignore[arg-type]
    (lambda _: DecodeImage(size=(0, 4)), ValueError, "height"),
    (lambda _: DecodeImage(size=(4, -1)), ValueError, "width"),
    (lambda _: DecodeImage(size=(2.5, 3)), TypeError, "height"),  # type: ignore[arg-type]
    (lambda _: DecodeImage(size=64), ValueError, r"\(height, width\), got 64"),  # type: ignore[arg-type]
    *(
        (lambda _, size=size: DecodeImage(size=size), ValueError, r": write size=\(224, 224\)")
        for size in (224, np.int64(0), True)
    ),
    (
        lambda _: DecodeImage(size=[4]),
        ValueError,
        r"size must be \(height, width\), got \[4\]: write",
    ),  # type: ignore[arg-type]
    (lambda _: DecodeImage(fit="crop"), ValueError, r"fit= needs size=\(height, width\)"),
    (
        lambda _: DecodeImage(size=(2, 2), fit="fill"),
        ValueError,
        "'stretch', 'crop', 'pad', got 'fi",
    ),  # type: ignore[arg-type]
    (lambda _: DecodeImage(reducing_gap=2.0), ValueError, r"reducing_gap= needs size=\(height"),
    (lambda _: DecodeImage(size=(2, 2), reducing_gap=0.5), ValueError, "at least 1, got 0.5"),
    (lambda _: DecodeImage(size=(2, 2), reducing_gap=float("nan")), ValueError, "1, got nan"),
    (feed(collate={"word": "concat"}), ValueError, "stack, pad, ragged, or a Pad, got 'concat'"),
    *(
        (
            feed(3, decode=other_dtype_for_not, collate=how),
            DecodeError,
            r"record 3 \(.*\): .*int64 where ui",
        )
        for how in ("stack", "pad", "ragged")
    ),
    (
        feed(0, decode=lambda _: {"x": [1]}, collate={"x": Pad(value=0.5)}),
        ValueError,
        "'Pad of x' holds float64 0.5 where int64",
    ),
    (feed(0, batch_transform=3), DecodeError, "batch_transform at .*not callable"),
    (feed(0, collate_fn=dict), TypeError, "batch_transform="),
    (
        feed(0, of=NAMES["mask"], batch_transform=lambda batch, _: {"mask": batch["label"]}),
        ValueError,
        "'mask' has a name",
    ),
    (
        feed(batch_spec={"x": ((), "int64")}),
        ValueError,
        "batch_spec describes the result of batch_transform",
    ),
    (
        feed(0, batch_transform=lambda b, _: b, batch_spec={"z": ((), "int64")}),
        DecodeError,
        r"step 0: the fields are \['label', 'word'\] where \['label', 'word', 'z'\] are",
    ),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_feed_refuses_bad_arguments(
    index: Index, call: Call, kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        call(index)


def test_reserved_names_of_columns_and_fields_are_refused(tmp_path: Path) -> None:
    for name, of in NAMES.items():
        column = pack([{name: n} for n in range(6)], tmp_path / f"{name} column")["data"]
        with pytest.raises(ValueError, match=f"^column {name!r} {OF_BATCH}: .* with fields="):
            Feed(column, of)
        field = pack([{name: b"x"} for n in range(6)], tmp_path / f"{name} field")["data"]
        with pytest.raises(ValueError, match=f"^field {name!r} {OF_BATCH}: .* with fields="):
            Feed(field, of)
        renamed = Feed(field, of, decode=lambda sample, name=name: {"own": sample[name]})
        assert batch_of(renamed, request_of(0))["own"] == [b"x"]


@pytest.mark.parametrize(("end", "value"), [("length", np.ones(2)), ("shape", np.ones((2, 1)))])
@pytest.mark.parametrize("how", ["pad", Pad(value=1), {"x": "pad"}])
def test_field_named_as_padding_sizes_is_refused(end: str, value: Any, how: Any) -> None:
    """Fault 109: the true lengths would take the place of the user's values."""
    name, numbers, sampler = (
        f"x_{end}",
        np.arange(6),
        BatchSampler(SequentialSampler(6), batch_size=4),
    )
    x = {"x": [value] * 6}

    def both(sample: dict[str, Any]) -> dict[str, Any]:
        return {name: 1, "x": value}

    feeds: dict[str, list[Any]] = {
        "field": [
            (DatasetSource(x | {name: numbers}), {}),
            (DatasetSource({name: numbers} | x), {}),
            (DatasetSource(x), {"decode": both}),
            (DatasetSource(x), {"transform": both}),
            (DatasetSource(x), {"decode": both, "batch_transform": lambda batch, _: batch}),
        ],
        "column": [(DatasetSource(x, columns={name: numbers}), {})],
        "side table": [(DatasetSource(x), {"side": {name: numbers}})],
    }
    for what, cases in feeds.items():
        for rows, options in cases:
            feed = Feed(rows, sampler, collate=how, **options)
            with pytest.raises(
                ValueError, match=f"^{what} '{name}' has the name of the sizes that 'pad' adds"
            ):
                feed[0, 0]
            assert Feed(rows, sampler, **options)[0, 0][name].shape == (4,)  # nothing is padded
    spec = {"x": FieldSpec(value.shape, value.dtype), name: FieldSpec((), np.dtype(int))}
    with pytest.raises(ValueError, match=f"^field '{name}' has the name"):
        Feed(DatasetSource(x), sampler, decode=both, collate=how, spec=spec)[0, 0]
    other = Feed(DatasetSource(x | {"y_length": numbers, "y_shape": numbers}), sampler, collate=how)
    assert other[0, 0]["y_length"].tolist() == [0, 1, 2, 3]
