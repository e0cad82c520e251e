"""The programs of the page on loaders of other libraries: each delivers the ids of NumpyLoader."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import ROOT
from support.programs import EXAMPLES, run

PAGE = (ROOT / "docs" / "your-loader.md").read_text()
SECTIONS = PAGE.split("\n## ")[1:]
PROGRAMS = sorted(path.stem for path in (EXAMPLES / "hosts").glob("*.py"))
PROGRAMS.remove("same_ids")  # what they share
# Of the extra `hosts`.
EXTRA = {"hydra", "mmengine", "pytorch_metric_learning", "sentence_transformers"}
# Those that train, or start processes.
LONG = [
    *("accelerate_ranks", "endless_pass", "grain_dataset", "keras_pydataset", "lightning_fit"),
    *("stateful_dataloader", "torch_dataloader", "transformers_trainer", "webdataset_pipeline"),
    *("hydra_config", "mmengine_runner", "ordered_training"),
    *("pytorch_metric_learning_training", "sentence_transformers_training"),
]
pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(pytest.param(name, None, marks=pytest.mark.long) for name in LONG),
        pytest.param("sentence_transformers_training", 2, marks=pytest.mark.long),
        pytest.param("transformers_trainer", 2, marks=pytest.mark.long),
        *((name, None) for name in PROGRAMS if name not in LONG),
    ],
)
def test_host_examples_give_ids_of_numpy_loader(
    name: str, ranks: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = EXAMPLES / "hosts" / f"{name}.py"
    for library in EXTRA:
        if library in path.read_text() and not find_spec(library):
            pytest.skip(f"needs {library}, of the extra `hosts`")
    monkeypatch.chdir(tmp_path)
    printed = run(path, ranks=ranks)
    assert printed.count("ids: those of NumpyLoader") >= (ranks or 1)
    assert "NOT those" not in printed
    for section in SECTIONS:
        if f"hosts/{name}.py" in section:
            for text in re.findall(r"```text\n(.*?)```", section, re.DOTALL):
                assert text in printed


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_pydataset_example_runs_on_other_backends(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    assert "ids: those of NumpyLoader" in run(EXAMPLES / "hosts" / "keras_pydataset.py")


def test_page_of_hosts_lists_every_program() -> None:
    assert set(re.findall(r"examples/hosts/(\w+)\.py", PAGE)) == {*PROGRAMS, "same_ids"}
