"""`Results`: the results of an exact pass are whole, in order, for any number of ranks."""

from contextlib import suppress
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfeed.loaders import Feed, Index, LoaderError, Ragged, Results, pack
from twinfeed.samplers import ExactOnceBatchSampler


def collected(sampler: ExactOnceBatchSampler, world: int, n: int, **options) -> list[Results]:
    """What each rank has collected: of each record its number, squared, and its parity as text."""
    ranks = [Results(n, run="a", **options) for _ in range(world)]
    for rank, results in enumerate(ranks):
        for _, _, ids in sampler.shard(rank, world).passes():
            results.add(
                ids,
                square=np.stack([ids**2, ids], 1),
                parity=["even odd"[i % 2 * 5 :] for i in ids],
            )
    return ranks


def gather_of(ranks: list[Results]):
    return lambda part: [rank.part() for rank in ranks]


@given(n=st.integers(1, 100), world=st.integers(1, 7), batch=st.integers(1, 20), pad=st.booleans())
def test_gathered_table_is_in_record_order(n: int, world: int, batch: int, pad: bool) -> None:
    sampler = ExactOnceBatchSampler(n, batch_size=batch, last_batch="pad" if pad else "smaller")
    ranks = collected(sampler, world, n)
    for rank in ranks:
        table = rank.gather(gather_of(ranks))
        assert table["square"].tolist() == [[i * i, i] for i in range(n)]
        assert table["parity"].tolist() == [["even odd", "odd"][i % 2] for i in range(n)]


@given(st.data())
def test_gather_names_missing_and_repeated_records(data: st.DataObject) -> None:
    n, world = data.draw(st.integers(3, 40)), data.draw(st.integers(1, 7))
    lost, twice = data.draw(st.permutations(range(n)))[:2]
    ranks = [Results(n) for _ in range(world)]
    for i in [i for i in range(n) if i != lost] + [twice]:
        ranks[data.draw(st.integers(0, world - 1))].add([i], value=[i])
    for rank in ranks:
        with pytest.raises(LoaderError) as raised:
            rank.gather(gather_of(ranks))
        assert f"1 have no result [{lost}]" in str(raised.value)
        assert f"1 have too many results [{twice}]" in str(raised.value)


def test_gathered_subset_is_in_the_order_of_ids() -> None:
    chosen = np.array([7, 2, 5])
    sampler = ExactOnceBatchSampler(9, batch_size=2, records=chosen)
    ranks = collected(sampler, 2, 9, ids=chosen)
    assert ranks[0].gather(gather_of(ranks))["square"][:, 1].tolist() == [7, 2, 5]
    ranks[0].add([3], square=[[9, 3]], parity=["odd"])
    with pytest.raises(LoaderError, match=r"1 have too many results \[3\]"):
        ranks[0].gather(gather_of(ranks))


def test_ranks_gather_over_saved_files(tmp_path: Path) -> None:
    ranks = collected(ExactOnceBatchSampler(11, batch_size=4), 3, 11)
    paths = [tmp_path / f"{rank}.npz" for rank in range(3)]
    for rank, path in zip(ranks, paths, strict=True):
        rank.save(path)
    table = Results.load(paths).gather()
    assert table["square"].tolist() == ranks[0].gather(gather_of(ranks))["square"].tolist()
    with pytest.raises(LoaderError, match="have no result"):
        Results.load(paths[1:]).gather()
    for one in (paths[1], str(paths[1])):
        assert len(Results.load(one).part()) == 4
    Results(12).save(paths[0])
    with pytest.raises(LoaderError, match="records are not those"):
        Results.load(paths)
    whole = paths[1].read_bytes()
    for place in range(0, len(whole), 7):
        paths[1].write_bytes(whole[:place] + b"?" + whole[place + 1 :])
        with suppress(LoaderError):
            read = Results.load(paths[1:])
            assert len(read.part()) == 7


@pytest.mark.parametrize("world", range(1, 8))
def test_metrics_are_equal_for_every_world_size(world: int) -> None:
    """Recall at 1 and the mean average precision of the table are equal for every world."""
    rng = np.random.default_rng(0)
    embedding, label = rng.normal(size=(61, 8)), rng.integers(0, 5, 61)
    ranks = [Results(61) for _ in range(world)]
    for rank, results in enumerate(ranks):
        sampler = ExactOnceBatchSampler(61, batch_size=16, last_batch="pad").shard(rank, world)
        for _, _, ids in sampler.passes():
            results.add(ids, embedding=embedding[ids], label=label[ids])
    table = ranks[-1].gather(gather_of(ranks))
    assert metrics(table["embedding"], table["label"]) == metrics(embedding, label)


def metrics(embedding: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    distance = ((embedding[:, None] - embedding) ** 2).sum(-1)
    np.fill_diagonal(distance, np.inf)
    same = label[np.argsort(distance, axis=1, kind="stable")[:, :-1]] == label[:, None]
    precision = np.cumsum(same, 1) / np.arange(1, len(label))
    return same[:, 0].mean(), ((precision * same).sum(1) / same.sum(1)).mean()


@pytest.mark.frameworks
def test_add_accepts_tensors_of_every_framework() -> None:
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
        results = Results(3)
        results.add(ids, row=tensor, word=tf.constant(["to", "be", "or"]))
        table = results.gather()
        assert table["row"].tolist() == [[2, 3], [4, 5], [0, 1]]
        assert table["word"].tolist() == [b"be", b"or", b"to"]


@pytest.mark.frameworks
def test_bfloat16_round_trips_through_a_file(tmp_path: Path) -> None:
    import torch

    results = Results(2)
    results.add([1, 0], row=torch.tensor([0.5, 3], dtype=torch.bfloat16))
    results.save(tmp_path / "rank.npz")
    assert Results.load(tmp_path / "rank.npz").gather()["row"].tolist() == [3, 0.5]


def test_added_rows_are_copied() -> None:
    buffer = np.zeros(2)
    results = Results(4)
    for step in range(2):
        buffer[:] = step
        results.add([2 * step, 2 * step + 1], value=buffer)
    assert results.gather()["value"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("error", "ids", "values", "word"),
    [
        (IndexError, [3], {"a": [0]}, "ids"),
        (IndexError, [-2], {"a": [0]}, "ids"),
        (TypeError, [0.5], {"a": [0]}, "integers"),
        (ValueError, [0, 1], {"a": [0]}, "row for each"),
        (ValueError, [0], {"a": 7}, "row for each"),
        (TypeError, [0], {"b": [0]}, r"field names .*'a'.* and .*'b'.* mismatch"),
        (TypeError, [0], {"a": [[0]]}, "'id', 'a'|dtype"),
        (ValueError, [0], {"a": [0], "id": [0]}, "'id' occurs more than once"),
        (TypeError, [0], {"a": [None]}, "objects"),
        (ValueError, [0], {"a": ["x"]}, "one kind of values, got int64 and <U1: convert"),
        (ValueError, [0], {"a": [np.array([1])]}, "one kind of values, got int64 and object"),
        (TypeError, {"id": [0], "a": [1]}, {}, "ids must be numbers"),
        (TypeError, np.ma.array([0]), {"a": [1]}, "ids must be .* got objects or masked values"),
        (ValueError, [0, 1], {"a": [[1], [1, 2]]}, "inhomogeneous"),
        (TypeError, [0], {"a": np.ma.array([1])}, "got objects or masked values"),
        (ValueError, [0], {"a": Ragged(np.arange(3), np.array([2]))}, "Ragged of 3 values .*2"),
        (ValueError, [0, 1], {"a": Ragged(np.arange(1), np.array([2, -1]))}, "'a' holds a Ragged"),
        (
            ValueError,
            [0] * 4,
            {"a": Ragged(np.arange(0), np.full(4, 1 << 62))},
            "'a' holds a Ragged",
        ),
        (ValueError, [0], {"a": Ragged(np.arange(1), np.array([1.0]))}, "give non-negative"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    error: type[Exception], ids, values, word: str
) -> None:
    results = Results(3)
    results.add([2], a=[1])
    with pytest.raises(error, match=word):
        results.add(ids, **values)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (np.array([2**53 + 1]), np.array([0.5]), False),
        (np.array([-(2**53) - 1]), np.array([0.5]), False),
        (np.array([2**53 + 1], np.uint64), np.array([-1]), False),
        (np.array([True]), np.array([7]), False),
        (np.array([1.5], np.float32), np.array([7], np.int16), False),
        (np.array([1.5], np.float32), np.array([7.0]), True),
        (np.array([7], np.int64), np.array([7], ">i8"), True),
        (np.array(["a"]), np.array(["abc"]), True),
        (np.array(["a"]), np.array([b"b"]), False),
        (np.array([True]), np.array(["b"]), False),
        (np.array([7]), np.array([7], "m8[s]"), False),
        ([np.array([1])], np.array([7]), False),
        ([np.array([1.0])], np.array([7.0]), False),
        ([np.array([1.0])], [np.array([1])], False),
        ([np.zeros((1, 4))], [np.zeros((0, 3))], False),
        ([np.array(["a", "b"])], [np.array(["abc"])], True),
    ],
)
def test_fault_111_values_are_returned_as_added(first: Any, second: Any, kept: bool) -> None:
    """Whether two batches or two ranks are joined, in either order."""
    for values in ((first, second), (second, first)):
        ranks = [Results(2), Results(2)]
        for n, rank in enumerate(ranks):
            rank.add([n], x=values[n])
        if not kept:
            with pytest.raises(ValueError, match=r"must have one kind of|must match exactly"):
                ranks[0].gather(gather_of(ranks))
            continue
        found = ranks[0].gather(gather_of(ranks))["x"]
        rows = rows_of(found) if isinstance(found, Ragged) else found.tolist()
        assert rows == [np.asarray(value[0]).tolist() for value in values]


def rows_of(ragged: Ragged) -> list[Any]:
    """The lists of a `Ragged`."""
    return [part.tolist() for part in np.split(ragged.values, np.cumsum(ragged.lengths)[:-1])]


@given(st.data())
def test_ragged_results_are_gathered_in_order(data: st.DataObject) -> None:
    n, world = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    boxes = [np.full((length, 4), i, np.float32) for i, length in enumerate(lengths)]
    words = [np.array([f"{i}"] * length, "U") for i, length in enumerate(lengths)]
    ranks = [Results(n, run="a") for _ in range(world)]
    for rank, results in enumerate(ranks):
        sampler = ExactOnceBatchSampler(n, batch_size=3, last_batch="pad").shard(rank, world)
        for _, _, ids in sampler.passes():
            rows = [boxes[i] for i in ids]
            whole = Ragged(
                np.concatenate([boxes[0][:0], *rows]), np.array([len(row) for row in rows], int)
            )
            listed = data.draw(st.booleans())
            results.add(ids, box=rows if listed else whole, word=[words[i] for i in ids], n=ids)
    with TemporaryDirectory() as folder:
        paths = [Path(folder, f"{rank}.npz") for rank in range(world)]
        for results, path in zip(ranks, paths, strict=True):
            results.save(path)
        tables = [ranks[0].gather(gather_of(ranks)), Results.load(paths).gather()]
    for table in tables:
        assert table["box"].lengths.tolist() == table["word"].lengths.tolist() == lengths
        assert table["box"].values.dtype == np.float32
        assert rows_of(table["box"]) == [box.tolist() for box in boxes]
        assert rows_of(table["word"]) == [word.tolist() for word in words]
        assert table["n"].tolist() == list(range(n))


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_add_accepts_ragged_tensors_of_every_framework() -> None:
    import jax.numpy as jnp
    import tensorflow as tf
    import torch

    rows: list[list[float]] = [[1, 2], [], [3]]
    torches = [torch.tensor(row, dtype=torch.float32) for row in rows]
    for value in (
        torch.nested.nested_tensor(torches, layout=torch.jagged, requires_grad=True),
        torch.nested.nested_tensor(torches, requires_grad=True),
        torch.nested.narrow(  # with gaps
            torch.tensor([[0.0, 1, 2], [0, 0, 0], [0, 0, 3]]),
            1,
            torch.tensor([1, 0, 2]),
            torch.tensor([2, 0, 1]),
            layout=torch.jagged,
        ),
        torches,
        tf.ragged.constant(rows, dtype=tf.float32),
        [tf.constant(row, tf.float32) for row in rows],
        [jnp.array(row, jnp.float32) for row in rows],
    ):
        results = Results(3)
        results.add([2, 1, 0], row=value)
        found = results.gather()["row"]
        assert (rows_of(found), found.values.dtype) == (rows[::-1], np.float32)


def test_fault_111_file_of_another_run_is_refused(tmp_path: Path) -> None:
    """Of other records, another stream, another evaluation, or one without a name."""
    paths = [tmp_path / "0.npz", tmp_path / "1.npz"]
    index, moved = (
        pack([{"x": n + more} for n in range(4)], tmp_path / f"{more}")["data"] for more in (0, 1)
    )

    def save(rank: int, source: Index = index, run: object = 7, **options: Any) -> None:
        feed = Feed(source, ExactOnceBatchSampler(4, **{"batch_size": 2, **options}))
        results = Results(feed.shard(rank, 2), run=run)
        results.add([2 * rank, 2 * rank + 1], x=[0, 1])
        results.save(paths[rank])

    def refused() -> None:
        with pytest.raises(LoaderError, match=r"give all ranks one name .*\n  path: .*1.npz"):
            Results.load(paths)

    save(0)
    save(1, run=np.int64(7))
    assert Results.load(paths).gather()["x"].tolist() == [0, 1, 0, 1]
    others: list[dict[str, Any]] = [{"batch_size": 3}, {"source": moved}, {"run": 8}, {"run": None}]
    for options in others:
        save(1, **options)
        refused()
    for nameless in (None, ""):
        save(0, run=nameless)
        save(1, run=nameless)
        refused()
    save(0)
    results = Results(4, run=7)  # of no feed
    results.add([2, 3], x=[0, 1])
    results.save(paths[1])
    refused()
    assert len(Results.load(paths[1]).part()) == 2  # a single file is of one evaluation


def test_save_deletes_no_file_by_its_name(tmp_path: Path) -> None:
    """Though it is named as a killed save leaves one."""
    names = {f".rank.npz-{n:016x}" for n in range(2)}
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    Results(3).save(tmp_path / "rank.npz")
    assert {path.name for path in tmp_path.iterdir()} == {*names, "rank.npz"}


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: Results({"x": [1]}), "n, if not a feed, must be an integer, got {"),
        (lambda: Results("3"), "n, if not a feed, must be an integer, got '3'"),
        (lambda: Results(0).gather(5), "not callable"),
        (lambda: Results(0).gather(lambda _: None), "not NoneType"),
    ],
)
def test_calls_with_a_wrong_argument_are_refused(call: Any, word: str) -> None:
    with pytest.raises(TypeError, match=word):
        call()


def test_ranks_with_other_results_are_refused() -> None:
    ranks = [Results(2) for _ in range(3)]
    for n, (rank, names) in enumerate(zip(ranks, ("a", "b", ""), strict=True)):
        rank.add([n % 2], **{name: [1] for name in names})
    for other in ranks[1:]:
        with pytest.raises(TypeError, match="field names"):
            ranks[0].gather(gather_of([ranks[0], other]))
    alone = Results(2)
    alone.add([1, 0])  # to know alone that each record came once
    assert alone.gather() == {}
    ranks = [Results(1), Results(1)]
    ranks[0].part()  # a rank without batches knows no names
    ranks[0].add([0], score=[2])
    with pytest.raises(TypeError):
        ranks[0].add([0], score=[[2]])
    assert ranks[1].gather(gather_of(ranks))["score"].tolist() == [2]


def test_damaged_file_takes_no_more_memory_than_its_bytes(tmp_path: Path) -> None:
    """A damaged number of records would be 16 TB of counts."""
    path = tmp_path / "rank.npz"
    results = Results(1 << 41, ids=[0, 1 << 40])
    results.add([0, 1 << 39], a=[0, 1])
    results.save(path)
    with pytest.raises(LoaderError, match=r"of 2 records 1 have no result .* 1 have too many"):
        Results.load([path]).gather()


@pytest.mark.parametrize("values", [[1, "a"], [b"a\0", b"b"], [2**53 + 1, 0.5], ["a", np.nan]])
def test_values_that_numpy_would_change_are_refused(values: list[Any]) -> None:
    """As a list, and as objects, which TensorFlow's strings become."""
    objects = np.array(values, object)
    ragged = Ragged(objects, np.array([2, 0]))
    for result in (values, objects, ragged, [objects, np.zeros(0)], [values, np.zeros(0)]):
        with pytest.raises((TypeError, ValueError), match=r"x must be values of one kind|not hold"):
            Results(2).add([0, 1], x=result)
