"""`Collect`: the results of an exact pass are whole, in order, for any number of ranks."""

from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfeed.loaders import Collect, LoaderError
from twinfeed.samplers import ExactOnceBatchSampler


def collected(sampler: ExactOnceBatchSampler, world: int, n: int, **options) -> list[Collect]:
    """What each rank has collected: of each record its number, squared, and its parity as text."""
    ranks = [Collect(n, **options) for _ in range(world)]
    for rank, collect in enumerate(ranks):
        for ids in sampler.shard(rank, world):
            collect.add(
                ids,
                square=np.stack([ids**2, ids], 1),
                parity=["even odd"[i % 2 * 5 :] for i in ids],
            )
    return ranks


def gather_of(ranks: list[Collect]):
    return lambda part: [rank.part() for rank in ranks]


@given(n=st.integers(1, 100), world=st.integers(1, 7), batch=st.integers(1, 20), pad=st.booleans())
def test_the_table_is_in_the_order_of_the_records(
    n: int, world: int, batch: int, pad: bool
) -> None:
    sampler = ExactOnceBatchSampler(n, batch_size=batch, final="pad" if pad else "smaller")
    ranks = collected(sampler, world, n)
    for rank in ranks:
        table = rank.merged(gather_of(ranks))
        assert table["square"].tolist() == [[i * i, i] for i in range(n)]
        assert table["parity"].tolist() == [["even odd", "odd"][i % 2] for i in range(n)]


@given(st.data())
def test_what_is_lost_and_what_comes_twice_are_both_named(data: st.DataObject) -> None:
    n, world = data.draw(st.integers(3, 40)), data.draw(st.integers(1, 7))
    lost, twice = data.draw(st.permutations(range(n)))[:2]
    ranks = [Collect(n) for _ in range(world)]
    for i in [i for i in range(n) if i != lost] + [twice]:
        ranks[data.draw(st.integers(0, world - 1))].add([i], value=[i])
    for rank in ranks:
        with pytest.raises(LoaderError) as raised:
            rank.merged(gather_of(ranks))
        assert f"1 have no result [{lost}]" in str(raised.value)
        assert f"1 have too many results [{twice}]" in str(raised.value)


def test_a_part_of_the_records_is_in_the_order_of_only() -> None:
    chosen = np.array([7, 2, 5])
    sampler = ExactOnceBatchSampler(9, batch_size=2, records=chosen)
    ranks = collected(sampler, 2, 9, only=chosen)
    assert ranks[0].merged(gather_of(ranks))["square"][:, 1].tolist() == [7, 2, 5]
    ranks[0].add([3], square=[[9, 3]], parity=["odd"])
    with pytest.raises(LoaderError, match=r"1 have too many results \[3\]"):
        ranks[0].merged(gather_of(ranks))


def test_ranks_meet_over_files(tmp_path: Path) -> None:
    ranks = collected(ExactOnceBatchSampler(11, batch_size=4), 3, 11)
    paths = [tmp_path / f"{rank}.npz" for rank in range(3)]
    for rank, path in zip(ranks, paths, strict=True):
        rank.save(path)
    table = Collect.load(paths).merged()
    assert table["square"].tolist() == ranks[0].merged(gather_of(ranks))["square"].tolist()
    with pytest.raises(LoaderError, match="have no result"):
        Collect.load(paths[1:]).merged()
    for one in (paths[1], str(paths[1])):
        assert len(Collect.load(one).part()) == 4
    Collect(12).save(paths[0])
    with pytest.raises(LoaderError, match="other records"):
        Collect.load(paths)
    whole = paths[1].read_bytes()
    for place in range(0, len(whole), 7):
        paths[1].write_bytes(whole[:place] + b"?" + whole[place + 1 :])
        with suppress(LoaderError):
            read = Collect.load(paths[1:])
            assert len(read.part()) == 7


@pytest.mark.parametrize("world", range(1, 8))
def test_figures_are_those_of_one_rank(world: int) -> None:
    """Recall at 1 and the mean average precision of the table are equal for every world."""
    rng = np.random.default_rng(0)
    embedding, label = rng.normal(size=(61, 8)), rng.integers(0, 5, 61)
    ranks = [Collect(61) for _ in range(world)]
    for rank, collect in enumerate(ranks):
        for ids in ExactOnceBatchSampler(61, batch_size=16, final="pad").shard(rank, world):
            collect.add(ids, embedding=embedding[ids], label=label[ids])
    table = ranks[-1].merged(gather_of(ranks))
    assert figures(table["embedding"], table["label"]) == figures(embedding, label)


def figures(embedding: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    distance = ((embedding[:, None] - embedding) ** 2).sum(-1)
    np.fill_diagonal(distance, np.inf)
    same = label[np.argsort(distance, axis=1, kind="stable")[:, :-1]] == label[:, None]
    precision = np.cumsum(same, 1) / np.arange(1, len(label))
    return same[:, 0].mean(), ((precision * same).sum(1) / same.sum(1)).mean()


@pytest.mark.frameworks
def test_tensors_of_every_framework_are_taken() -> None:
    import jax.numpy as jnp
    import tensorflow as tf
    import torch

    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    for tensor, ids in product(
        [
            torch.tensor(rows, requires_grad=True),
            tf.constant(rows),
            jnp.asarray(rows),
            rows.tolist(),
        ],
        [
            np.array([2, 0, 1]),
            torch.tensor([2, 0, 1]),
            tf.constant([2, 0, 1]),
            jnp.array([2, 0, 1]),
        ],
    ):
        collect = Collect(3)
        collect.add(ids, row=tensor, word=tf.constant(["to", "be", "or"]))
        table = collect.merged()
        assert table["row"].tolist() == [[2, 3], [4, 5], [0, 1]]
        assert table["word"].tolist() == [b"be", b"or", b"to"]


@pytest.mark.frameworks
def test_bfloat16_comes_back_from_a_file(tmp_path: Path) -> None:
    import torch

    collect = Collect(2)
    collect.add([1, 0], row=torch.tensor([0.5, 3], dtype=torch.bfloat16))
    collect.save(tmp_path / "rank.npz")
    assert Collect.load(tmp_path / "rank.npz").merged()["row"].tolist() == [3, 0.5]


def test_rows_are_the_collection_s_own() -> None:
    buffer = np.zeros(2)
    collect = Collect(4)
    for step in range(2):
        buffer[:] = step
        collect.add([2 * step, 2 * step + 1], value=buffer)
    assert collect.merged()["value"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("error", "ids", "results", "word"),
    [
        (IndexError, [3], {"a": [0]}, "ids"),
        (IndexError, [-2], {"a": [0]}, "ids"),
        (TypeError, [0.5], {"a": [0]}, "integers"),
        (ValueError, [0, 1], {"a": [0]}, "row for each"),
        (ValueError, [0], {"a": 7}, "row for each"),
        (ValueError, [0], {"b": [0]}, "same names and shapes"),
        (ValueError, [0], {"a": [[0]]}, r"'a', .*\(1,\)"),
        (ValueError, [0], {"a": [0], "id": [0]}, "'id' occurs more than once"),
        (TypeError, [0], {"a": [None]}, "objects"),
    ],
)
def test_what_does_not_fit_is_refused(error: type[Exception], ids, results, word: str) -> None:
    collect = Collect(3)
    collect.add([2], a=[1])
    with pytest.raises(error, match=word):
        collect.add(ids, **results)


def test_ranks_with_other_results_are_refused() -> None:
    ranks = [Collect(2) for _ in range(3)]
    for n, (rank, names) in enumerate(zip(ranks, ("a", "b", ""), strict=True)):
        rank.add([n % 2], **{name: [1] for name in names})
    for other in ranks[1:]:
        with pytest.raises(ValueError, match=r"same names and shapes, got .*'a'.* and "):
            ranks[0].merged(gather_of([ranks[0], other]))
    alone = Collect(2)
    alone.add([1, 0])  # to know alone that each record came once
    assert alone.merged() == {}
    ranks = [Collect(1), Collect(1)]
    ranks[0].part()  # a rank without batches knows no names
    ranks[0].add([0], score=[2])
    with pytest.raises(ValueError, match="same names and shapes"):
        ranks[0].add([0], score=[[2]])
    assert ranks[1].merged(gather_of(ranks))["score"].tolist() == [2]


def test_a_damaged_file_takes_no_more_memory_than_its_bytes(tmp_path: Path) -> None:
    """A damaged number of records would be 16 TB of counts."""
    path = tmp_path / "rank.npz"
    rows = np.array([(0, 0), (1 << 39, 1)], [("id", np.int64), ("a", np.int64)])
    np.savez(path, n=1 << 41, only=[0, 1 << 40], rows=rows)
    with pytest.raises(LoaderError, match=r"of 2 records 1 have no result .* 1 have too many"):
        Collect.load([path]).merged()
