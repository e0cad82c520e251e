"""Digests of the content of an index, which do not depend on the container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinfeed.loaders import (
    pack,
)


@pytest.mark.filterwarnings("ignore:fields that some")
def test_digests_are_equal_in_every_container_for_equal_content(tmp_path: Path) -> None:
    """And another class, of that name alone, where a record, its place or a value differs."""

    def digests(container: str, samples: list[dict[str, Any]]) -> dict[str, str]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        return dict(pack(samples, out, container=container)["data"].digests)

    samples: list[dict[str, Any]] = [
        {"__key__": f"k{n}", "image": bytes([n]) * n, "label": n % 3} for n in range(7)
    ]
    one = digests("tar", samples)
    assert set(one) == {"image", "label"}
    assert digests("tfrecord", samples) == one
    changed = [*samples[:6], samples[6] | {"image": b"other"}]
    assert digests("tfrecord", changed)["image"] != one["image"]
    assert digests("tfrecord", changed)["label"] == one["label"]
    assert digests("tar", [*samples[1:], samples[0]])["image"] != one["image"]
    missing_error = [{name: v for name, v in samples[0].items() if name != "image"}, *samples[1:]]
    assert digests("tar", missing_error)["image"] != digests("tfrecord", samples)["image"]
    assert digests("tar", missing_error)["image"] == digests("tfrecord", missing_error)["image"]
    assert digests("tar", samples[:6])["label"] != one["label"]


def test_digest_tells_integer_zero_from_float_zero(tmp_path: Path) -> None:
    """Their bytes are the same."""
    found = [pack([{"x": zero}] * 3, tmp_path / f"{zero}")["data"].digests for zero in (0, 0.0)]
    assert found[0]["x"] != found[1]["x"]


def test_lists_of_numbers_have_no_digest(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [
        {"x": np.arange(n + 1), "y": float(n), "z": b"z"} for n in range(3)
    ]
    index = pack(samples, tmp_path / "a", container="tfrecord")["data"]
    assert index.fields["x"].kind == "int64_list"
    assert set(index.digests) == {"y", "z"}
