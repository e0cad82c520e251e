"""The README's code runs as it stands there, from top to bottom, on a folder of images."""

import re
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parent.parent / "README.md"


def photos(root: Path) -> None:
    """Ten classes with ten images each, of different sizes."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(100):
        path = root / f"class{number % 10}" / f"{number:02}.{'jpg' if number % 3 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (40 + number, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)


@pytest.mark.frameworks
def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {number}", "exec"), names)


def test_every_public_sampler_is_in_its_table() -> None:
    import twinfeed.samplers as samplers

    text = README.read_text()
    missing = [name for name in samplers.__all__ if name.endswith("Sampler") and name not in text]
    assert missing == []
