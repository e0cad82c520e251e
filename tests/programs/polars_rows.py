"""Rows over polars and Grain, in a process of their own: they warn of every later fork in it."""

from pathlib import Path
from typing import Any

import grain
import numpy as np
import polars
import pytest
from support.datasets import SAMPLES, Dicts

from twinfeed.loaders import DatasetSource, Feed, NumpyLoader
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import BatchSampler, RandomSampler
from twinfeed.testing import check_source


class Frame(Dicts):
    """A dataset over polars, whose threads hang in a forked child."""

    fork_safe = False

    def __init__(self) -> None:
        self.frame = polars.DataFrame({"number": range(100_000)})

    def __getitem__(self, number: int) -> Any:
        assert self.frame.sort("number").group_by("number").len().height == 100_000
        return SAMPLES[number]


def batches(loader: Any) -> list[Any]:
    with loader:
        return [
            (np.asarray(batch["id"]).tolist(), np.asarray(batch["x"]).tolist(), batch["word"])
            for batch in loader
        ]


def main() -> None:
    sampler = BatchSampler(RandomSampler(len(SAMPLES), seed=0), batch_size=4)
    expected = batches(NumpyLoader(Feed(DatasetSource(SAMPLES), sampler)))
    columns = {name: [sample[name] for sample in SAMPLES] for name in SAMPLES[0]}
    x = polars.Series(columns["x"], dtype=polars.Array(polars.Float32, 4))
    frame = polars.DataFrame({**columns, "x": x})
    with pytest.raises(TypeError, match=r"give frame.to_arrow\(\) \(polars\)"):
        DatasetSource(frame)
    rows = DatasetSource(frame.to_arrow(), label="label")
    assert batches(NumpyLoader(Feed(rows, sampler))) == expected

    rows = DatasetSource(grain.MapDataset.source(SAMPLES), label="label")
    check_source(rows)
    assert batches(NumpyLoader(Feed(rows, sampler))) == expected

    feed = Feed(DatasetSource(Frame()), sampler)
    assert batches(NumpyLoader(feed)) == expected  # the threads of polars start
    with pytest.raises(ValueError, match="forked workers may hang"):
        TorchLoader(feed, num_workers=1, multiprocessing_context="fork")
    assert batches(TorchLoader(feed, num_workers=1)) == expected
    print("the same", Path(__file__).stem)


if __name__ == "__main__":
    main()
