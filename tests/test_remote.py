"""Shards at URLs: requests in flight, failures that pass and that stay, objects that changed."""

from __future__ import annotations

import http.server
import multiprocessing
import os
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batches import expected, made
from inside import ALONE, EXTENT, opening, wire
from inside import network as _network
from making_shards import tars, tfrecords
from range_server import RangeServer

from twinfeed.loaders import (
    Feed,
    Index,
    LoaderError,
    NumpyLoader,
    Reader,
    ShardWarning,
    StaleIndexError,
    build_index,
    open_index,
    pack,
    plan,
)
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    SequentialSampler,
    ShardShuffleSampler,
    WeightedSampler,
)

MIB = 1 << 20


def network(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Use the network in another way; the pauses are short in every test."""
    fast = replace(_network.NETWORK, first_pause=0.01, longest_pause=0.02, patience=0.09)
    monkeypatch.setattr(_network, "NETWORK", replace(fast, **changes))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    network(monkeypatch)


def large(folder: Path, *, shards: int, records: int, size: int) -> Index:
    """Pack records of `size` random bytes."""
    data = np.random.default_rng(0)
    samples = ({"x": data.bytes(size)} for _ in range(shards * records))
    return pack(samples, folder, shard_records=records)["data"]


def at(server: RangeServer, index: Index) -> Index:
    """Return the index with its shards at the server."""
    return open_index(index.path, root=server.url)


def extents(index: Index, ids: Any) -> Any:
    """Return a range for each of these records."""
    rows = index.rows(["x"], np.asarray(ids))
    told = np.zeros(len(rows), EXTENT)
    told["file"], told["start"], told["span"] = rows["file"], rows["offset"], ALONE
    told["stop"] = rows["offset"] + rows["length"]
    return told


def test_a_remote_index_gives_the_batches_of_a_local_one(
    tmp_path: Path, server: RangeServer
) -> None:
    tfrecords(tmp_path, shards=5, each=40)
    local = build_index(tmp_path / "*.tfrecord", tmp_path / "l.index")
    remote = build_index(
        [f"{server.url}/{name}" for name in local.shard_paths.tolist()], tmp_path / "r.index"
    )
    assert remote.fingerprint == local.fingerprint
    assert remote.root == server.url
    assert server.asked["WHOLE"] == 0
    order = ShardShuffleSampler(local.shard_lengths, block=4, window=4, seed=0)
    sampler = BatchSampler(order, batch_size=16)
    assert expected(local, sampler, epochs=[1]) == expected(remote, sampler, epochs=[1])


def test_neighbours_are_one_request_and_others_are_not(tmp_path: Path, server: RangeServer) -> None:
    index = large(tmp_path, shards=2, records=40, size=10_000)
    with Reader(at(server, index)) as reader:
        found = reader.read([3, 4, 5, 30, 50])["x"]
    with Reader(index) as reader:
        assert found == reader.read([3, 4, 5, 30, 50])["x"]
    assert server.asked == {"GET": 3}, "the size of a shard comes with its ranges"
    assert server.sent < 5 * 10_000 + 2 * 200


def test_the_requests_in_flight_reach_the_bound_over_shards_and_batches(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 4 MiB: 8 at once, of two shards, before any answer comes."""
    network(monkeypatch, requests=8, in_flight=64 * MIB)
    index = large(tmp_path, shards=2, records=8, size=4 * MIB)
    server.hold(8)
    with Reader(at(server, index)) as reader:
        reader._fetcher.ahead(extents(index, range(16)))
        for record in range(16):
            reader.read([record])
    assert server.most == 8
    assert server.asked == {"GET": 16}


def test_the_bytes_in_flight_stay_within_their_bound(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    network(monkeypatch, requests=8, in_flight=3 * MIB)
    index = large(tmp_path, shards=1, records=16, size=MIB)
    server.hold(2)
    with Reader(at(server, index)) as reader:
        reader._fetcher.ahead(extents(index, range(16)))
        reader.read(range(16))
    assert 2 * MIB <= server.most_bytes <= 3 * MIB


def test_a_range_is_fetched_once_and_dropped_when_it_is_passed(
    tmp_path: Path, server: RangeServer
) -> None:
    index = large(tmp_path, shards=1, records=8, size=1000)
    told = np.array([(0, 0, int(index.shards["bytes"][0]), ALONE, 3)], EXTENT)
    with Reader(at(server, index)) as reader:
        reader._fetcher.ahead(told)
        for record in range(8):
            reader._fetcher.passed(3)
            reader.read([record])
        assert server.asked["GET"] == 1
        reader._fetcher.passed(4)
        reader.read([0])
        assert server.asked["GET"] == 2


@pytest.mark.parametrize("batch_size", [4, 16, 64])
def test_open_blocks_stay_however_much_they_take(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """Else a block that made room would be asked for record by record."""
    network(monkeypatch, held=20_000)
    index = large(tmp_path, shards=2, records=1024, size=900)
    sampler = ShardShuffleSampler(index.shard_lengths, block=8, window=16, seed=0)
    feed = Feed(at(server, index), BatchSampler(sampler, batch_size=batch_size))
    asked = plan(feed, readahead=30_000).requests
    server.clear()
    for epoch in range(2):
        ids = [batch["id"] for batch in made(feed, epoch, ahead=30_000)]
        assert np.array_equal(np.sort(np.concatenate(ids)), np.arange(len(index)))
    assert server.asked["GET"] <= 2.2 * asked


def test_ranges_are_needed_in_another_order_than_they_were_told(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranges come, even if not all can begin at once, and none drops another of its batch."""
    network(monkeypatch, held=1000)
    index = large(tmp_path, shards=1, records=8, size=900)
    with Reader(at(server, index)) as reader, Reader(index) as local:
        reader._fetcher.ahead(extents(index, [5, 3, 7, 1]))
        for ids in ([3, 5], [7], [1]):
            assert reader.read(ids) == local.read(ids)
    assert server.asked["GET"] == 4


@pytest.mark.parametrize("fate", [500, 503, 429, "reset", "short"])
def test_what_may_pass_is_tried_again(tmp_path: Path, server: RangeServer, fate: int | str) -> None:
    index = large(tmp_path, shards=1, records=8, size=1000)
    fates = iter([fate, fate])
    server.fail = lambda _path, _start: next(fates, None)
    with Reader(at(server, index)) as reader, Reader(index) as local:
        assert reader.read([5]) == local.read([5])
    assert server.asked["GET"] == 3


@pytest.mark.parametrize("fate", [500, 429, "reset", "short"])
def test_what_does_not_pass_is_told_with_range_and_attempts(
    tmp_path: Path, server: RangeServer, fate: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network(monkeypatch, patience=0.03)
    index = large(tmp_path, shards=1, records=8, size=1000)
    server.fail = lambda _path, _start: fate
    with Reader(at(server, index)) as reader, pytest.raises(LoaderError) as caught:
        reader.read([5])
    row = index.rows(["x"], np.array([5]))[0]
    assert caught.value.path == f"{server.url}/{index.shard_paths[0]}"
    assert caught.value.expected == f"bytes {row['offset']} to {row['offset'] + row['length']}"
    assert "(3 attempts in" in str(caught.value.found)
    assert server.asked["GET"] == 3
    server.fail = lambda _path, _start: None
    with Reader(at(server, index)) as reader:
        assert len(reader.read([5])["x"]) == 1


def test_what_failed_ahead_of_its_batch_is_asked_for_again(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage a loader goes on, and does not raise old errors one by one."""
    network(monkeypatch, patience=0)
    index = large(tmp_path, shards=1, records=8, size=1000)
    server.fail = lambda _path, _start: 503
    with Reader(at(server, index)) as reader, Reader(index) as local:
        reader._fetcher.ahead(extents(index, range(8)))
        held = reader._fetcher._held._held  # type: ignore[attr-defined]
        while not all(one.failed for one in held.values()):
            time.sleep(0.01)
        server.fail = lambda _path, _start: None
        for record in range(8):
            assert reader.read([record]) == local.read([record])


@pytest.mark.parametrize(("patience", "attempts"), [("0", 1), ("0.03", 3), ("0.06", 5)])
def test_the_environment_says_how_long_is_tried(
    tmp_path: Path,
    server: RangeServer,
    patience: str,
    attempts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pauses of 0.01, 0.02, 0.02 … seconds take so many seconds together."""
    monkeypatch.setenv("TWINFEED_PATIENCE", patience)
    index = large(tmp_path, shards=1, records=8, size=1000)
    server.fail = lambda _path, _start: 503
    with Reader(at(server, index)) as reader, pytest.raises(LoaderError, match="TWINFEED_PATIENCE"):
        reader.read([5])
    assert server.asked["GET"] == attempts


class Forbids(http.server.BaseHTTPRequestHandler):
    """Answer every request with the status 403."""

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline()
        if self.parse_request():
            self.send_error(403)


@pytest.mark.parametrize("named", ["*.tar", "x.index"], ids=["a listing", "an object"])
def test_a_store_without_its_bucket_or_its_credentials_names_them(
    named: str, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(words: str, bucket: str) -> None:
        def call(url: str) -> Index:
            return build_index(url, tmp_path / "x") if "*" in named else open_index(url)

        with pytest.raises(LoaderError, match=words):
            call(f"s3://{bucket}/{named}")

    monkeypatch.setattr(opening, "_stores", {})
    monkeypatch.setenv(_network.PATIENCE, "0")
    if "*" in named:
        refuses("there is no bucket .* no-such-bucket", "no-such-bucket")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forbids) as forbids:
        threading.Thread(target=forbids.serve_forever).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{forbids.server_port}")
        refuses(r"(?s)refuses to serve.*set AWS_ACCESS_KEY_ID", "forbidden")
        forbids.shutdown()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    refuses(r"^no credentials are in the environment\n(.|\n)*set AWS_ACC.*profiles are not", "none")


ANSWER = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Reduce your
request rate.</Message><RequestId>1</RequestId></Error>"""


class Answers(http.server.BaseHTTPRequestHandler):
    """Answer as S3 does: with the status that the bucket is named after."""

    def do_GET(self) -> None:
        self.send_response(int(self.path[1:4]))
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)


@pytest.mark.parametrize(
    ("bucket", "problem", "found"),
    [
        ("403", "the store refuses to serve this", "403 Forbidden: SlowDown: Reduce your request"),
        ("400", "the server refuses the request", "400 Bad Request: SlowDown: Reduce your request"),
        ("503", "the server cannot be reached", "503 Service Unavailable: SlowDown: Reduce your"),
        ("301", "the server refuses the request", "Received redirect without LOCATION"),
    ],
)
def test_an_answer_of_a_store_is_told_in_its_words_and_no_others(
    bucket: str, problem: str, found: str, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_stores", {})
    monkeypatch.setenv(_network.PATIENCE, "0")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as answers:
        threading.Thread(target=answers.serve_forever).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{answers.server_port}")
        with pytest.raises(LoaderError) as caught:
            open_index(f"s3://{bucket}/x.index")
        answers.shutdown()
    assert caught.value.problem.startswith(problem)
    said = str(caught.value.found)
    assert found in said
    assert "<" not in said


def test_an_endpoint_without_encryption_is_allowed_first(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_stores", {})
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(LoaderError, match=r"AWS_ENDPOINT_URL .* without encryption") as caught:
        open_index(f"{s3}/x.index")
    assert caught.value.advice == "set AWS_ALLOW_HTTP=true, in a network that you trust"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://127.0.0.1:1")  # which counts
    with pytest.raises(LoaderError, match="cannot be reached") as caught:
        open_index(f"{s3}/x.index")
    assert str(caught.value.found).startswith("HTTP error: error sending request (Connect) (")


def test_a_shard_without_an_ending_is_known_by_its_first_bytes(
    tmp_path: Path, server: RangeServer
) -> None:
    tars(tmp_path, shards=1)[0].rename(tmp_path / "shard")
    assert build_index(f"{server.url}/shard", tmp_path / "x.index").container == "tar"


def test_a_pattern_that_nothing_matches_is_named(s3: str, tmp_path: Path) -> None:
    build_index(tfrecords(tmp_path), f"{s3}/there/x.index")
    for place in (f"{s3}/there", f"{s3}/nowhere", tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=f"^no shard matches '{place}/.*check the name"):
            build_index(f"{place}/*.tar", tmp_path / "x")


@pytest.mark.parametrize("given", ["", " ", "localhost:9000", "http://", "http://a:99999"])
@pytest.mark.parametrize(
    ("name", "url"),
    [("AWS_ENDPOINT_URL", "s3"), ("AZURE_ENDPOINT", "az"), ("GOOGLE_BASE_URL", "gs")],
)
def test_an_endpoint_that_is_no_url_is_named(
    name: str, url: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore panics at some of these."""
    monkeypatch.setenv(name, given)
    with pytest.raises(LoaderError, match=rf"(?s){name} .* not the URL .*found: '{given}'.*unset"):
        open_index(f"{url}://no-such-bucket/x.index")


@pytest.mark.parametrize(
    "given", ["http://user:S3CRET@host:99999", "user:S3CRET@host", "http://user:a#S3CRET@host"]
)
def test_a_secret_in_an_endpoint_is_not_shown(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", given)
    with pytest.raises(LoaderError, match="not the URL of a server") as caught:
        open_index("s3://no-such-bucket/x.index")
    assert "S3CRET" not in str(caught.value)


def test_a_wrong_variable_of_a_store_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_S3_EXPRESS", "perhaps")
    with pytest.raises(LoaderError, match=r"(?s)cannot be opened .*perhaps.*mend or unset"):
        open_index("s3://no-such-bucket/x.index")


@pytest.mark.parametrize("patience", ["soon", "-1", "nan"])
def test_a_patience_that_is_no_number_of_seconds_is_refused(
    tmp_path: Path, server: RangeServer, patience: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINFEED_PATIENCE", patience)
    index = large(tmp_path, shards=1, records=8, size=1000)
    with (
        Reader(at(server, index)) as reader,
        pytest.raises(ValueError, match=f"seconds, 0 or more, got '{patience}'"),
    ):
        reader.read([5])


@pytest.mark.parametrize("fate", [400, 403, 404])
def test_what_cannot_pass_is_not_tried_again(
    tmp_path: Path, server: RangeServer, fate: int
) -> None:
    index = large(tmp_path, shards=1, records=8, size=1000)
    server.fail = lambda _path, _start: fate
    with Reader(at(server, index)) as reader:
        with pytest.raises(FileNotFoundError if fate == 404 else LoaderError) as caught:
            reader.read([5])
        assert index.shard_paths[0] in str(caught.value)
    assert server.asked["GET"] == 1


def test_a_server_that_hangs_is_a_time_out(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    network(monkeypatch, patience=0.01, request_seconds=0.3)
    index = large(tmp_path, shards=1, records=8, size=1000)
    monkeypatch.setattr(opening, "_stores", {})
    server.fail = lambda _path, _start: "hang"
    with Reader(at(server, index)) as reader, pytest.raises(LoaderError, match=r"Time.*2 attempts"):
        reader.read([5])


def test_a_server_without_ranges_is_named(tmp_path: Path, server: RangeServer) -> None:
    index = large(tmp_path, shards=1, records=8, size=1000)
    server.fail = lambda _path, _start: "whole"
    with (
        Reader(at(server, index)) as reader,
        pytest.raises(LoaderError, match="does not serve ranges"),
    ):
        reader.read([5])
    with pytest.raises(LoaderError, match="does not serve ranges"):
        build_index(f"{server.url}/{index.shard_paths[0]}", tmp_path / "x.index")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_object_that_changed_is_told_with_both_tags(
    tmp_path: Path, server: RangeServer, when: str
) -> None:
    """Another tag, at the same size: an error at the first reading, and at the next."""
    name = large(tmp_path, shards=1, records=8, size=1000).shard_paths[0]
    server.tags[name] = '"old"'
    index = build_index(f"{server.url}/{name}", tmp_path / "x.index")
    assert index.tag(0) == '"old"'
    with Reader(index) as reader:
        if when == "meanwhile":
            reader.read([1])
        server.tags[name] = '"new"'
        with pytest.raises(StaleIndexError, match=r'tag "old"\n  found: .*tag "new"'):
            reader.read([2])
    (tmp_path / "mirror").symlink_to(tmp_path)
    mirror = open_index(index.path, root=f"{server.url}/mirror")
    with Reader(mirror) as reader:
        reader.read([2])  # another place has other tags, and the bytes are checked


def test_an_object_of_another_size_is_stale(tmp_path: Path, server: RangeServer) -> None:
    index = large(tmp_path, shards=1, records=8, size=1000)
    shard = tmp_path / index.shard_paths[0]
    shard.write_bytes(shard.read_bytes()[:-2000])
    size = shard.stat().st_size
    for record in (0, 7):  # within what is left, and beyond
        with (
            Reader(at_url(server, index)) as reader,
            pytest.raises(StaleIndexError, match=f"found: {size} bytes"),
        ):
            reader.read([record])


def at_url(server: RangeServer, index: Index) -> Index:
    """Return the index as a pickle gives it elsewhere: its local shards are not looked at."""
    kind, arguments = index.__reduce__()[:2]  # type: ignore[misc]
    return kind(arguments[0], server.url, *arguments[2:])  # type: ignore[operator, no-any-return]


def _read(reader: Reader, queue: Any) -> None:
    reader._fetcher.ahead(extents(reader.index, [5, 6, 7]))
    queue.put((os.getpid(), reader.read([5, 6, 7])["x"]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_reads_with_connections_of_its_own(
    tmp_path: Path, server: RangeServer, method: str
) -> None:
    """The parent has read, so that its threads and connections are there to be inherited."""
    index = at(server, large(tmp_path, shards=1, records=8, size=1000))
    context: Any = multiprocessing.get_context(method)
    with Reader(index) as reader:
        want = reader.read([5, 6, 7])["x"]
        reader._fetcher.ahead(extents(index, [0, 1]))
        queue = context.Queue()
        process = context.Process(target=_read, args=(reader, queue), daemon=True)
        process.start()
        pid, found = queue.get(timeout=60)
        process.join(60)
    assert process.exitcode == 0
    assert (pid, found) == (process.pid, want)


def test_errors_of_the_network_pickle(tmp_path: Path, server: RangeServer) -> None:
    error = _network.no_ranges("http://x/a.tar")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert type(again) is type(error)


def test_a_process_that_ends_waits_for_no_request_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    assert all(wire.Wire().submit(int, 1, soon=soon).cancelled() for soon in (True, False))


def test_no_thread_stays_when_nothing_is_asked_for(tmp_path: Path, server: RangeServer) -> None:
    index = large(tmp_path, shards=1, records=8, size=1000)
    with Reader(at(server, index)) as reader:
        reader.read(range(8))
    mine = [thread for thread in threading.enumerate() if thread.name == "twinfeed-request"]
    for thread in mine:
        thread.join(10)
    assert not any(thread.is_alive() for thread in mine)
    assert wire.wire()._threads == 0


def test_a_loader_keeps_the_requests_in_flight_at_their_bound(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 4 MiB of a shuffle: behind the first batches, the planner fills the wire."""
    network(monkeypatch, requests=8)
    index = large(tmp_path, shards=4, records=16, size=MIB)
    server.hold(8, after=5)  # the size of a shard, and the blocks of the first batches
    order = ShardShuffleSampler(index.shard_lengths, block=4, window=4, seed=0)
    sampler = BatchSampler(order, batch_size=4)
    with NumpyLoader(Feed(at(server, index), sampler), prefetch=1) as loader:
        server.clear()
        assert sum(len(batch["id"]) for batch in loader) == 64
    assert server.most == 8
    assert server.asked["GET"] <= 24, "a block is one request, and a few are cut"


@pytest.mark.parametrize("readahead", [0, None])
@pytest.mark.parametrize("kind", ["random", "weighted", "shards", "once", "pk", "stored"])
def test_every_kind_of_stream_is_the_local_one(
    tmp_path: Path, server: RangeServer, kind: str, readahead: int | None
) -> None:
    samples = ({"x": b"%d" % n, "label": n % 7} for n in range(70))
    index = pack(samples, tmp_path, shards=3)["data"]
    orders: dict[str, Any] = {
        "random": RandomSampler(70, seed=1),
        "weighted": WeightedSampler(np.arange(1, 71), seed=1),
        "shards": ShardShuffleSampler(index.shard_lengths, block=5, window=3, seed=1),
        "stored": SequentialSampler(70),
    }
    sampler: Any = {
        "once": ExactOnceBatchSampler(70, batch_size=16, final="pad"),
        "pk": PKBatchSampler(index.class_order, p=4, k=2, seed=1),
    }.get(kind) or BatchSampler(orders[kind], batch_size=16)
    for rank in range(2):
        feeds = [Feed(one, sampler).shard(rank, 2) for one in (index, at(server, index))]
        for epoch in range(2):
            pairs = zip(*(made(feed, epoch, ahead=readahead) for feed in feeds), strict=True)
            for one, other in pairs:
                assert one.keys() == other.keys()
                for name in one:
                    assert np.array_equal(one[name], other[name])


def test_an_epoch_in_random_order_asks_for_little_more_than_its_bytes(
    tmp_path: Path, server: RangeServer
) -> None:
    """Ranges are merged over a gap of a record at most."""
    index = at(server, large(tmp_path, shards=2, records=48, size=10_000))
    feed = Feed(index, BatchSampler(RandomSampler(96, seed=0), batch_size=16))
    server.clear()
    with NumpyLoader(feed, prefetch=2) as loader:
        assert sum(len(batch["id"]) for batch in loader) == 96
    assert server.sent <= 1.1 * 96 * 10_000


def test_packing_in_another_order_asks_for_each_byte_once(
    tmp_path: Path, server: RangeServer
) -> None:
    """Not for every field of every record by itself; the index and its classes stay the same."""
    samples = [
        {"x": bytes([n % 251]) * 900, "y": b"y" * (n % 40), "label": f"class {n % 7}"}
        for n in range(1000)
    ]
    samples[3].pop("y")
    with pytest.warns(ShardWarning, match="lack"):
        pack(samples, tmp_path, shards=4)
    far = at(server, open_index(tmp_path / "data.index"))
    server.clear()
    with pytest.warns(ShardWarning, match="lack"):
        again = pack(far, tmp_path / "near", seed=1)["data"]
    assert server.asked["GET"] < 100
    assert server.sent < 1.2 * int(far.shards["bytes"].sum())
    assert sorted(again.classes) == sorted(far.classes)
    with Reader(again) as reader:
        packed_ = reader.read(range(1000))
    assert sorted(zip(*packed_.values(), strict=True)) == sorted(
        (one["x"], one.get("y", b"")) for one in samples
    )
    assert not (tmp_path / "near" / "cache").exists()


def test_an_empty_field_asks_for_nothing(tmp_path: Path, server: RangeServer) -> None:
    """As a list of boxes is where an image has none."""
    samples = (
        {"x": bytes(2000), "boxes": np.ones(number % 3, np.float32)} for number in range(2000)
    )
    pack(samples, tmp_path, shards=4)
    index = at(server, open_index(tmp_path / "data.index"))
    order = ShardShuffleSampler(index.shard_lengths, block=100, window=8, seed=0)
    feed = Feed(index, BatchSampler(order, batch_size=50), fields=["boxes"], collate="ragged")
    asked = plan(feed).requests
    server.clear()
    with NumpyLoader(feed, prefetch=2) as loader:
        assert sum(len(batch["id"]) for batch in loader) == 2000
    assert server.asked["GET"] <= 1.2 * asked


@pytest.mark.parametrize("kind", ["random", "shards"])
def test_epochs_in_a_row_ask_for_each_byte_once(
    tmp_path: Path, server: RangeServer, kind: str
) -> None:
    """What is read over the end of an epoch is what the next epoch then reads, not more."""
    records, size = 96, 20_000
    index = at(server, large(tmp_path, shards=2, records=48, size=size))
    order: Any = RandomSampler(records, seed=0)
    if kind == "shards":
        order = ShardShuffleSampler(index.shard_lengths, block=6, window=4, seed=0)
    feed = Feed(index, BatchSampler(order, batch_size=16))
    server.clear()
    with NumpyLoader(feed, prefetch=2, readahead=20 * size) as loader:
        for epoch in range(5):
            assert sum(len(batch["id"]) for batch in loader) == records
            begun = 40 * (epoch > 0)  # records of the next epoch: the bound, and the last batch
            assert server.sent <= 1.1 * ((epoch + 1) * records + begun) * size
            if epoch > 1:
                assert server.sent >= 0.7 * epoch * records * size, "nothing is kept for long"
