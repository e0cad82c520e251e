"""Digests of the content of an index, which do not depend on the container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinfeed.loaders import Feed, NumpyLoader, pack
from twinfeed.samplers import BatchSampler, SequentialSampler, StateMismatchError

WHOLE = BatchSampler(SequentialSampler(3), batch_size=3)


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


def test_lists_have_digests_that_states_compare(tmp_path: Path) -> None:
    """In a tar they are text, so a state does not compare them with those of a TFRecord."""
    samples: list[dict[str, Any]] = [
        {"x": np.arange(n + 1), "y": float(n), "z": b"z"} for n in range(3)
    ]
    others = [*samples[:2], samples[2] | {"x": np.arange(3) - 1}]
    index, again, other, tar = (
        pack(data, tmp_path / name, container="tar" if name == "d" else "tfrecord")["data"]
        for name, data in (("a", samples), ("b", samples), ("c", others), ("d", samples))
    )
    assert index.fields["x"].kind == "int64_list"
    assert index.digests == again.digests
    assert {name for name, one in index.digests.items() if other.digests[name] != one} == {"x"}
    state = NumpyLoader(Feed(index, WHOLE, fields=["z"])).state_dict()
    NumpyLoader(Feed(tar, WHOLE, fields=["z"])).load_state_dict(state)
    with pytest.raises(
        StateMismatchError, match=r"saved with other records, or lists .* 'x' has the"
    ):
        NumpyLoader(Feed(other, WHOLE, fields=["z"])).load_state_dict(state)
