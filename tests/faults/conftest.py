"""The index that several modules of faults damage."""

from pathlib import Path

import pytest
from support.shards import tfrecords

from twinfeed.loaders import Index, build_index


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return build_index(tfrecords(tmp_path), tmp_path / "x.index", label="label")
