"""The index that the tests of the torch loader share."""

import pytest

from twinfeed.loaders import Index


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    from support.torch_feeds import pack_words  # here, since pytest imports this without torch too

    return pack_words(tmp_path_factory.mktemp("words"))
