"""The index of the tests of Reader; other modules here have their own."""

import pytest
from support.shards import tfrecords

from twinfeed.loaders import Index, build_index


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("data")
    return build_index(tfrecords(folder, shards=5, each=40), folder / "x.index")
