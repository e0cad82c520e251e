"""What else may happen to a running pass: `close` in another thread, a copy, a pickle."""

import copy
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import forking
from programs.forking import BATCH, RECORDS, SAMPLER, ids, wanted

from twinfeed.loaders import DecodeError, Feed, FieldSpec, Index, NumpyLoader, Ragged, pack
from twinfeed.samplers import ExactOnceBatchSampler

# Long tests, as another loader of the same framework reads and waits as they do.
REPETITIONS = ("numpy, copied", "torch, workers that stay")
LOADERS = [
    pytest.param(
        name,
        marks=[
            *[pytest.mark.frameworks] * (not name.startswith("numpy")),
            *[pytest.mark.long] * (name in REPETITIONS),
        ],
        id=name,
    )
    for name in forking.LOADERS
]
# Once for each framework, and with its other options in a long test.
FEW = [
    pytest.param(
        *loader.values,
        id=loader.id,
        marks=[*loader.marks, *[pytest.mark.long] * ("," in loader.id)],
    )
    for loader in LOADERS
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    samples = ({"word": b"%d" % number} for number in range(RECORDS))
    return pack(samples, tmp_path_factory.mktemp("words"))["data"]


FIRST = {number for batch in wanted()[:3] for number in batch}


def slow(sample: dict[str, Any], *, while_there: Path) -> dict[str, Any]:
    """Take long over each sample after the first batches, as long as a folder exists."""
    time.sleep(0.05 if int(sample["word"]) not in FIRST and while_there.exists() else 0)
    return {"word": sample["word"]}


def set_epoch(loader: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # epoch 0 comes again
        loader.set_epoch(0)


def close(loader: Any) -> None:
    loader.close()


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        *(pytest.param(*loader.values, close, marks=loader.marks) for loader in LOADERS),
        *(pytest.param(*loader.values, set_epoch, marks=loader.marks) for loader in FEW),
    ],
)
def test_pass_ended_by_another_thread_raises_and_loses_nothing(
    index: Index, name: str, ends: Callable[..., None], tmp_path: Path
) -> None:
    """The loop that waits for a batch gets the error that is documented, and loses nothing."""
    decode = partial(slow, while_there=tmp_path)
    loader = forking.LOADERS[name]()(Feed(index, SAMPLER, decode=decode))
    got: list[list[int]] = []

    def other() -> None:
        while len(got) < 2:
            time.sleep(0.01)
        ends(loader)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RuntimeError, match="ended before its last batch"):
        got.extend(map(ids, loader))
    thread.join()
    tmp_path.rmdir()
    assert got == wanted()[: len(got)]
    rest = [ids(batch) for batch in loader]
    assert rest == wanted()[len(got) if ends is close else 0 :]
    loader.close()


def test_loop_that_counts_passes_from_0_after_a_resume_warns(index: Index) -> None:
    """In the rest of a state's epoch it names the next, and then epochs of the run before."""
    loader = NumpyLoader(Feed(index, SAMPLER))
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "step": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.set_epoch(2)
        list(loader)
        loader.set_epoch(3)
        list(loader)
    with pytest.warns(UserWarning, match="epoch 1 again.* count epochs from a loaded state's"):
        loader.set_epoch(1)


def pickled(loader: Any) -> Any:
    return pickle.loads(pickle.dumps(loader))


@pytest.mark.parametrize(
    ("name", "copied"),
    [
        *(pytest.param(*loader.values, pickled, marks=loader.marks) for loader in LOADERS),
        *(pytest.param(*loader.values, copy.deepcopy, marks=loader.marks) for loader in FEW),
    ],
)
def test_copied_loader_continues_at_same_step(index: Index, name: str, copied: Any) -> None:
    loader = forking.LOADERS[name]()(Feed(index, SAMPLER))
    batches = iter(loader)
    got = [ids(next(batches)) for _ in range(3)]
    other = copied(loader)
    assert (other.epoch, other.step) == (0, 3)
    assert got + [ids(batch) for batch in other] == wanted()
    assert got + [ids(batch) for batch in batches] == wanted()
    assert copied(loader).state_dict() == other.state_dict() == loader.state_dict()
    loader.close()
    other.close()


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy, copy.copy])
def test_copied_loader_begins_the_epoch_that_is_set(index: Index, copied: Any) -> None:
    """No state was loaded into it, whose step `set_epoch` would keep; into the other, one was."""
    loader = NumpyLoader(Feed(index, SAMPLER))
    for _ in zip(range(3), loader, strict=False):
        pass
    other = copied(loader)
    with pytest.warns(UserWarning, match="set_epoch starts epoch 0 again"):
        other.set_epoch(0)
    assert [ids(batch) for batch in other] == wanted()
    other.load_state_dict(loader.state_dict())
    other = copied(other)
    other.set_epoch(0)
    assert [ids(batch) for batch in other] == wanted()[3:]


@pytest.mark.parametrize("name", FEW)
def test_shallow_copy_shares_only_the_feed(index: Index, name: str) -> None:
    """Each of the two counts for itself, and closing the one does not end the other's pass."""
    loader = forking.LOADERS[name]()(Feed(index, SAMPLER))
    other = copy.copy(loader)
    assert getattr(other, "feed", None) is getattr(loader, "feed", None)
    batches = iter(other)
    got = [ids(next(batches))]
    loader.close()
    assert (loader.epoch, loader.step, other.epoch, other.step) == (0, 0, 0, 1)
    assert (loader.global_step, other.global_step) == (0, 1)
    assert got + [ids(batch) for batch in batches] == wanted()
    assert (loader.epoch, loader.step, other.epoch, other.step) == (0, 0, 1, 0)
    assert other.global_step == len(wanted())
    other.load_state_dict(other.state_at(2, 1))
    assert other.global_step == 2 * len(other) + 1
    other.close()


@pytest.mark.parametrize("name", LOADERS[:1])
def test_copied_evaluation_yields_its_remaining_batches(index: Index, name: str) -> None:
    loader = forking.LOADERS[name]()(Feed(index, ExactOnceBatchSampler(RECORDS, batch_size=BATCH)))
    batches = iter(loader)
    next(batches)
    other = copy.deepcopy(loader)
    assert [len(list(batches)), len(list(other)), len(list(other))] == [23, 23, 24]


def halves(sample: dict[str, Any]) -> dict[str, Any]:
    """Two fields of bfloat16: of torch, and of ml_dtypes."""
    import ml_dtypes
    import torch

    number = int(sample["word"]) / 2
    return {
        "torch": torch.full([2], number, dtype=torch.bfloat16),
        "numpy": np.full(int(sample["word"]) % 3, number, ml_dtypes.bfloat16),
    }


def floats(value: Any) -> np.ndarray:
    """The values of a field as numpy's float32, end to end where they are ragged."""
    if isinstance(value, Ragged):
        value = value.values
    elif getattr(value, "is_nested", False):  # torch's
        value = value.values()
    value = getattr(value, "flat_values", value)  # TensorFlow's
    return np.asarray(value.float() if hasattr(value, "float") else value, np.float32)


SERVED = ["numpy", "torch", "torch, workers", "tensorflow"]


@pytest.mark.frameworks
@pytest.mark.parametrize(("by", "how"), [("decode", "pad"), ("transform", "ragged")])
@pytest.mark.parametrize("name", SERVED)
def test_bfloat16_values_arrive_in_every_loader(index: Index, name: str, by: str, how: Any) -> None:
    made: dict[str, Any] = {by: halves}
    feed = Feed(index, SAMPLER, collate={"numpy": how}, **made)
    loader = forking.LOADERS[name]()(feed)
    for batch in loader:
        values = batch["torch"]
        assert str(values.dtype).endswith("bfloat16") or values.dtype.name == "bfloat16"
        assert floats(values).tolist() == [[number / 2] * 2 for number in ids(batch)]
        kept = floats(batch["numpy"])
        wanted = [number / 2 for number in ids(batch) for _ in range(number % 3)]
        assert sorted(kept[kept != 0].tolist()) == sorted(one for one in wanted if one)
    loader.close()


def texts(sample: dict[str, Any]) -> dict[str, Any]:
    """A text, and zero to two tokens."""
    word = sample["word"].decode()
    return {"text": f"né {word}", "tokens": [word] * ((int(word) + 1) % 3)}


@pytest.mark.frameworks
@pytest.mark.parametrize("name", SERVED)
def test_texts_arrive_as_str_except_in_tensorflow(index: Index, name: str) -> None:
    """Tokenizers take no bytes. TensorFlow has byte strings alone."""
    text = np.dtype(str)  # the first sample may have no tokens, which tell nothing
    spec = {"text": FieldSpec((), text), "tokens": FieldSpec((None,), text)}
    feed = Feed(index, SAMPLER, decode=texts, collate="ragged", spec=spec)
    loader = forking.LOADERS[name]()(feed)
    for batch in loader:
        found, tokens = batch["text"], batch["tokens"]
        if name.startswith("tensorflow"):
            found = [one.decode() for one in found.numpy()]
            tokens = [[one.decode() for one in row.numpy()] for row in tokens]
        elif isinstance(tokens, Ragged):
            tokens = [part.tolist() for part in np.split(tokens.values, np.cumsum(tokens.lengths))]
            assert tokens.pop() == []
        assert found == [f"né {number}" for number in ids(batch)]
        assert tokens == [[str(number)] * ((number + 1) % 3) for number in ids(batch)]
    loader.close()


@pytest.mark.frameworks
@pytest.mark.parametrize("by", ["decode", "transform"])
@pytest.mark.parametrize("kind", ["grad", "sparse", "meta"])
def test_tensors_without_values_are_refused_by_name(index: Index, kind: str, by: str) -> None:
    import torch

    def made(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": torch.ones(2) if sample["word"] != b"7" else bad}

    bad = {
        "grad": torch.ones(2, requires_grad=True),
        "sparse": torch.ones(2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
    }[kind]
    with pytest.raises(
        DecodeError, match=r"^record 7 .*field 'x' holds a Tensor that is not an array"
    ):
        list(NumpyLoader(Feed(index, SAMPLER, **{by: made})))  # type: ignore[arg-type]
