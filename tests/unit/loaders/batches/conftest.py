"""The index and the sampler of the tests of Feed; other modules here have their own."""

import pytest
from support.feeds import pack_six_words

from twinfeed.loaders import Index
from twinfeed.samplers import ExactOnceBatchSampler


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return pack_six_words(tmp_path_factory.mktemp("words"))


@pytest.fixture
def sampler() -> ExactOnceBatchSampler:
    return ExactOnceBatchSampler(6, batch_size=4)
