"""What is imported with the library, seen in fresh processes."""

import os
import subprocess
import sys

import pytest
from lint_files import FRAMEWORKS
from support.programs import PYTHON, QUIET

OPTIONAL = {
    "PIL",
    "simplejpeg",
    "tqdm",
    "fsspec",
    "urllib3",
    "matplotlib",
    "lightning",
}


def loaded_by(module: str, after: str = "sys", python: str = sys.executable) -> set[str]:
    """The top-level packages that importing `module` loads, after another module."""
    code = f"import {after}\nimport sys; before = {{*sys.modules}}; import {module}; "
    code += "print(*{name.partition('.')[0] for name in {*sys.modules} - before})"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, env=os.environ | QUIET
    )
    return set(done.stdout.split())


def third_party(names: set[str]) -> set[str]:
    private = {name for name in names if name.startswith("_")}
    return names - set(sys.stdlib_module_names) - private - {"twinfeed", "sitecustomize"}


def test_samplers_load_only_numpy() -> None:
    assert third_party(loaded_by("twinfeed.samplers")) <= third_party(loaded_by("numpy"))


def test_twinfeed_and_its_star_load_no_framework_and_no_extra() -> None:
    code = "import sys, twinfeed; from twinfeed import *; Feed; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & (FRAMEWORKS | OPTIONAL)


@pytest.mark.frameworks
def test_name_of_framework_loads_that_framework_alone() -> None:
    code = "import sys, twinfeed; twinfeed.{}; print(*sys.modules, *dir(twinfeed))"
    for name, framework in (("TorchLoader", "torch"), ("JaxLoader", "jax")):
        command = [sys.executable, "-c", code.format(name)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        loaded = set(done.stdout.split())
        assert loaded & FRAMEWORKS == {framework}
        assert {"TorchLoader", "JaxLoader"} <= loaded


@pytest.mark.frameworks
def test_name_of_missing_framework_is_not_listed_and_names_the_extra() -> None:
    """`help` and `inspect.getmembers` get each name of `dir`, and would end with the error."""
    code = """
import sys
sys.modules["jax"] = None
import twinfeed
print(*dir(twinfeed))
from twinfeed import JaxLoader
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    names = set(done.stdout.split())
    assert {"Feed", "TorchLoader", "__version__"} <= names
    assert names.isdisjoint({"JaxLoader", "attach", "lazy"})
    assert 'needs jax: pip install "twinfeed[jax]"' in done.stderr


def test_loaders_load_no_framework_and_no_extra() -> None:
    loaded = loaded_by("twinfeed.loaders")
    assert not loaded & (FRAMEWORKS | OPTIONAL)
    assert third_party(loaded) <= third_party(loaded_by("numpy")) | {"google_crc32c"}


@pytest.mark.frameworks
@pytest.mark.parametrize("backend", ["tensorflow", "grain"])
def test_backend_loads_no_other_framework(backend: str) -> None:
    """Other than the framework itself loads."""
    loaded = loaded_by(f"twinfeed.loaders.{backend}", after=backend, python=PYTHON)
    assert not loaded & FRAMEWORKS - {backend}
