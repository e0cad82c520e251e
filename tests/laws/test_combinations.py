"""The twin law over every source, sampler, loader and backend: the same bytes, or a refusal."""

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import pytest
from support import PROGRAMS
from support.cases import mark_long
from support.combinations import SAMPLERS, SOURCES, digest, feed, some, write
from support.plain import batches
from support.programs import PYTHON, QUIET

from twinfeed.loaders import Feed, NumpyLoader
from twinfeed.loaders.grain import as_map_dataset
from twinfeed.loaders.jax import JaxLoader
from twinfeed.loaders.tensorflow import TensorFlowLoader, choose, source_datasets
from twinfeed.loaders.torch import TorchLoader

pytestmark = [
    pytest.mark.usefixtures("graphs_as_written"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    jax.config.update("jax_enable_x64", True)
    root = tmp_path_factory.mktemp("combinations")
    write(root)
    yield root
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """The digest of two epochs of each sampler, by the plain definition."""
    return {name: digest(plain(feed(folder, "rows", name))) for name in SAMPLERS}


def plain(fed: Feed) -> Iterator[Any]:
    for epoch in range(2):
        yield from batches(fed, 0 if fed.sampler.evaluation else epoch)


def of(make: Callable[..., Any], **options: Any) -> Callable[[Feed], Iterator[Any]]:
    """Return a function that gives two epochs of a loader."""

    def epochs(fed: Feed) -> Iterator[Any]:
        with make(fed, **options) as loader:
            for _ in range(2):
                yield from loader

    return epochs


def by_steps(fed: Feed) -> Iterator[Any]:
    for epoch in range(2):
        for step in range(len(fed)):
            yield fed[0 if fed.sampler.evaluation else epoch, step]


def choosing(fed: Feed, **options: Any) -> Any:
    return choose(fed.sampler, source_datasets(fed), **options)


def by_grain(fed: Feed) -> Iterator[Any]:
    exact = fed.sampler.evaluation
    for _ in range(2 if exact else 1):
        yield from as_map_dataset(fed, epochs=1 if exact else 2).to_iter_dataset()


WORKERS: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"}

WAYS: dict[str, Callable[[Feed], Iterator[Any]]] = {
    "plain": plain,
    "feed[epoch, step]": by_steps,
    "NumPy": of(NumpyLoader),
    "torch": of(TorchLoader, device="cpu"),
    "torch, 2 workers": of(TorchLoader, device="cpu", num_workers=2, **WORKERS),
    "torch, 4 workers": of(TorchLoader, device="cpu", num_workers=4, **WORKERS),
    "TensorFlow": of(TensorFlowLoader, device="/CPU:0"),
    "TensorFlow, choose": of(choosing, device="/CPU:0"),
    "JAX": of(JaxLoader),
    "Grain": by_grain,
}

CHOOSE = "TensorFlow, choose"
CHOSEN = ["shards", "shards, stored", "mixture", "P x K", "P x K, all", "P x K, stored"]

# By way, source and sampler, and "" for any: the error, and a word of its message.
REFUSED: dict[tuple[str, str, str], tuple[type[Exception], str]] = {
    ("torch, 2 workers", "", "reuse"): (ValueError, "num_workers=0"),
    ("torch, 4 workers", "", "reuse"): (ValueError, "num_workers=0"),
    ("Grain", "", "reuse"): (ValueError, "reuse"),
    ("JAX", "", "a rank"): (ValueError, "whole feed"),
    **{(CHOOSE, "", name): (ValueError, "segments") for name in SAMPLERS if name not in CHOSEN},
}

SLOW = ["torch, 2 workers", "TensorFlow", CHOOSE]
FAST = ["torch", "JAX", "Grain", "plain", "feed[epoch, step]"]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "torch, 4 workers"])
@pytest.mark.parametrize("kind", SOURCES)
def test_each_loader_gives_same_batches_or_refuses(
    folder: Path, expected: dict[str, str], way: str, kind: str
) -> None:
    """In most ways some samplers with each source, and others in each way: all in a long test."""
    samplers = [*SAMPLERS]
    if way in SLOW:
        samplers = some(SLOW.index(way), kind)[::2]
    elif way in FAST:
        samplers = some(FAST.index(way), kind)
    check(folder, expected, way, kind, samplers)


@pytest.mark.long
@pytest.mark.parametrize("way", [*SLOW, *FAST, "torch, 4 workers"])
@pytest.mark.parametrize("kind", SOURCES)
def test_each_loader_serves_each_sampler_of_each_source(
    folder: Path, expected: dict[str, str], way: str, kind: str
) -> None:
    check(folder, expected, way, kind, SAMPLERS)


def check(
    folder: Path, expected: dict[str, str], way: str, kind: str, samplers: Iterable[str]
) -> None:
    got, wanted = {}, {}
    for name in samplers:
        fed = feed(folder, kind, name)
        refused = REFUSED.get((way, kind, "")) or REFUSED.get((way, "", name))
        if refused is None:
            got[name], wanted[name] = digest(WAYS[way](fed)), expected[name]
            continue
        error, word = refused
        with pytest.raises(error, match=word):
            next(WAYS[way](fed))
    assert got == wanted


@pytest.mark.parametrize("kind", mark_long(SOURCES, but_every=4))
def test_state_resumes_in_any_loader(folder: Path, expected: dict[str, str], kind: str) -> None:
    """Two batches of each loader, from the state of the loader before."""
    fed, got = feed(folder, kind, "random"), []
    loaders = [
        NumpyLoader(fed),
        TorchLoader(fed, device="cpu", num_workers=2),
        JaxLoader(fed),
        TensorFlowLoader(fed, device="/CPU:0"),
        TorchLoader(fed, device="cpu"),
    ]
    state = loaders[0].state_dict()
    for loader in loaders:
        with loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            got += [next(iter(loader)) for _ in range(2)]
            state = loader.state_dict()
    assert digest(got) == expected["random"]


@pytest.mark.parametrize(
    ("first", "backend"),
    [
        pytest.param(0, "torch", marks=pytest.mark.long),
        (1, "jax"),
        pytest.param(2, "tensorflow", marks=pytest.mark.long),
    ],
)
def test_keras_trains_on_equal_batches(
    folder: Path, expected: dict[str, str], first: int, backend: str
) -> None:
    """Each sampler with one source, and another in each backend: a fit is slow."""
    asked = [(kind, name) for kind in SOURCES for name in some(first, kind)]
    script = str(PROGRAMS / "keras_combinations.py")
    done = subprocess.run(
        [PYTHON, script, str(folder), *chain.from_iterable(asked)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | QUIET | {"KERAS_BACKEND": backend, "JAX_ENABLE_X64": "1"},
    )
    assert done.returncode == 0, done.stderr
    got = dict(zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert got == {(kind, name): expected[name] for kind, name in asked}
