"""Verifying: what an index leaves out hides nothing else, and an executor is sent little."""

from __future__ import annotations

import sys
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from format_help import archive, member
from making_shards import flip, tars, write_tfrecord

from twinfeed.loaders.formats import tfrecord
from twinfeed.loaders.index import open_index
from twinfeed.loaders.index.build import build_index
from twinfeed.loaders.verify import verify


@pytest.mark.parametrize("container", ["tfrecord", "tar"])
@pytest.mark.parametrize("leave_out", [False, True])
def test_a_label_that_changed_is_found_whatever_the_index_leaves_out(
    tmp_path: Path, container: str, leave_out: bool
) -> None:
    shard = tmp_path / f"a.{container}"

    def write(label: int) -> None:
        """Ten records, the third of this label, and the seventh damaged if it is to be left out."""
        labels = [n if n != 3 else label for n in range(10)]
        if container == "tfrecord":
            write_tfrecord(shard, [{"image": b"i", "label": n} for n in labels])
            if leave_out:
                flip(shard, [record.offset for record in tfrecord.scan(str(shard))][7] + 20)
        else:
            members = []
            for n, value in enumerate(labels):
                members += [member(b"%d.png" % n, b"i"), member(b"%d.cls" % n, b"%d" % value)]
                members += [member(b"%d.png" % n, b"i")] if leave_out and n == 7 else []
            archive(shard, *members)

    write(3)
    fields = {"image": "image;png"}
    label = "label" if container == "tfrecord" else "cls"
    bad = verify(shard, root=tmp_path).bad
    assert [one.record for one in bad] == [7] * leave_out
    index = build_index(shard, tmp_path / "x.index", label=label, fields=fields, exclude=bad)
    assert verify(index).ok
    write(5)
    (found,) = verify(index).bad
    assert "the shard has changed" in found.problem
    write(3)
    assert verify(index).ok


@pytest.mark.parametrize("workers", [None, 2])
def test_the_report_is_the_same_with_an_executor(tmp_path: Path, workers: int | None) -> None:
    shards = tars(tmp_path, shards=5)
    index = build_index(shards, tmp_path / "x.index", label="cls")
    for number in (1, 3):
        flip(shards[number], int(index.table("png")["offset"][10 * number + 4]))
    with ProcessPoolExecutor(workers) as pool:
        found = verify(index.path, executor=pool if workers else None)
    assert (found.shards, found.records) == (5, 50)
    assert [(bad.shard, bad.record) for bad in found.bad] == [
        ("d-000001.tar", 4),
        ("d-000003.tar", 4),
    ]


class Counting(Executor):
    """Run tasks at once, and count them."""

    def __init__(self) -> None:
        self.tasks = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks += 1
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def test_an_executor_opens_the_index_once_and_is_given_groups_of_shards(tmp_path: Path) -> None:
    index = build_index(tars(tmp_path, shards=600, each=1), tmp_path / "x.index")
    opened: list[str] = []
    watching = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and str(arguments[0]).endswith("manifest.json"):
            opened.append(str(arguments[0]))

    sys.addaudithook(note)
    executor = Counting()
    assert verify(open_index(index.path), executor=executor).shards == 600
    watching = False
    assert len(opened) == 2  # here, and where the executor works
    assert executor.tasks == 200
