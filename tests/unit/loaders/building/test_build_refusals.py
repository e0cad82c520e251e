"""What `build_index` refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import Call, Refused, check_refused
from support.shards import tars, tfrecords, write_tar, write_tfrecord

from twinfeed.loaders import (
    DataCorruptionError,
    DecodeError,
    Feed,
    FromFolder,
    FromJson,
    FromTable,
    LoaderError,
    NumpyLoader,
    build_index,
    verify,
)
from twinfeed.loaders.building.bad_records import BadRecord, read_bad_records
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.index.manifest import MANIFEST
from twinfeed.loaders.tools.verify import Report
from twinfeed.samplers import ExactOnceBatchSampler


def of(*shards: Any, out: str = "x.index", **options: Any) -> Call:
    """A call that indexes shards of the world, or of these samples. A dict is loose files."""

    def call(world: Path) -> object:
        made: list[Any] = []
        for number, shard in enumerate(shards):
            path = world / "made" / f"{number}"
            if isinstance(shard, str):
                made.append(world / shard)
            elif isinstance(shard, dict):
                for name, data in shard.items():
                    (world / "made" / f"{name}.x").write_bytes(data or b"")
                    made.append(Entry(name, {"x": f"made/{name}.x"} if data is not None else {}))
            elif isinstance(shard[0], dict):
                made.append(write_tfrecord(path.with_suffix(".tfrecord"), shard))
            else:
                made.append(write_tar(path.with_suffix(".tar"), shard))
        source = made[0] if len(made) == 1 and isinstance(made[0], Path) else made
        return build_index(source, world / out, **{"root": world} | options)

    return call


def classed(*texts: str | None) -> list[tuple[str, dict[str, bytes]]]:
    """Samples of keys a, b and so on, those of None without a label."""
    return [
        (key, {"png": b"..."} | ({} if text is None else {"cls": text.encode()}))
        for key, text in zip("abcdef", texts, strict=False)
    ]


def given(read: Callable[[Path], object], text: str) -> Call:
    """A call that reads a file of this text."""

    def call(world: Path) -> object:
        file = world / "made" / "given"
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
        return read(file)

    return call


def matched(file: Path) -> object:
    return FromTable(file).labels


def fails(sample: dict[str, Any]) -> int:
    value: int = {}[sample["__number__"]]
    return value


def second(value: Any) -> Any:
    """A function of labels that gives this value to the second record."""
    return lambda sample: value if sample["__number__"] else 1


TAR, RECORDS = "tar/*.tar", "records/*.tfrecord"

KEYS = {f"k{n}": n % 2 for n in range(10)}

LABELLED = [("a", {"cls": b"1", "label": b"a long text", "png": b"..."})]

CLASH = r"0\.tar is called 'label' .*fields=\{'text': 'label'\}"

PLAIN = {"cls": b"1", "png": b"..."}

WHOLE = PLAIN | {"clas": b"1", "jsn": b'{"a": 1}', "jpg": b"", "name": b"k"}

IN_FIELD = "label='.* gives a value that is not a label"

IN_JSON = r"label=FromJson.* gives a value that is not a label"

BY_FUNCTION = "function of label= gives a value that is not a label"

A_LABEL = r"labels must be all integers or all names, got an integer \("

FOREIGN = "a folder or a file of an index, .*give a pattern that matches only shards"

FEED = Feed({"x": np.arange(4)}, ExactOnceBatchSampler(4, batch_size=2))

# What is wrong, the class of the error, and a word that names the place or what to do.
REFUSED: Refused = [
    # Which shards
    (of("none/*.tar"), FileNotFoundError, "no shard matches .*none"),
    (lambda _: build_index("memory://none/*.tar", "x.index"), FileNotFoundError, "no shard match"),
    (of(), ValueError, "at least one file"),
    *(
        (lambda _, wrong=wrong: verify(wrong), TypeError, r"must be paths of files, got an? \w+")
        for wrong in (FEED, NumpyLoader(FEED), FEED.sampler, {"x": b""}, 3)
    ),
    (lambda _: build_index(FEED, "x.index"), TypeError, "must be paths of files, got a Feed"),
    *(
        (of(f"tar/{odd}"), ValueError, "unbalanced or nested braces in the shard pattern")
        for odd in ("a-{0..9.tar", "a}", "{a{b,c}")
    ),
    *(
        (of(f"tar/{many}"), ValueError, "more than 1000000")
        for many in ("{0..999999999}", "{0..1000000}", "{a,b}" * 60)
    ),
    (of("gaps/*"), ValueError, "3 of 10 missing, first: 00002.*complete=False"),
    (of("gaps/b-000000000-of-999999999"), ValueError, "missing, first: 000000001"),
    (of("beyond/*"), ValueError, "shard number 2 .* not below 2"),
    *(
        (of("tar/d-000000.tar", again), ValueError, r"named twice \(1: .*0\.tar and .*\.tar\)$")
        for again in ("tar/*.tar", "tar/../tar/d-000000.tar", "link.tar", "linked/d-000000.tar")
    ),
    (of("tar/gone.tar"), FileNotFoundError, r"gone\.tar"),
    *((of(*caught), LoaderError, FOREIGN) for caught in (["old*"], ["old.index", TAR], ["[t]ar"])),
    (lambda _: build_index("memory://none/", "x.index"), LoaderError, FOREIGN),
    (of({"a": None}), ValueError, "no Entry has a file"),
    (of("no images"), FileNotFoundError, "no image .*below the folder .*no images"),
    (of(TAR, root="/elsewhere"), ValueError, "must lie below the root /elsewhere.* give root="),
    # Where the index goes
    (of(TAR, out="tar"), FileExistsError, r"other files \(d-000000.*such as .*/tar/train\.index"),
    (of(TAR, out="tar/d-000000.tar"), FileExistsError, "a file; .*such as .*/tar/d-000000.index"),
    (lambda _: build_index("none", "https://127.0.0.1/x.index"), ValueError, "is a URL: write"),
    (of(TAR, out="application"), FileExistsError, r"\(manifest.json\).*/application/train\.index"),
    # Options
    (of(TAR, reading=3), TypeError, "build_index takes no reading=: shards are read by "),
    (of(TAR, label=lambda _: "chi\udcc3\udcaan"), DecodeError, "correct the function"),
    (of(RECORDS, key="__key__"), DataCorruptionError, "name another feature, such as 'key'"),
    (of(TAR, key="name"), ValueError, "are for tfrecord, got tar"),
    (of(RECORDS, join=True), ValueError, "join= is for tar, got tfrecord"),
    (of({"a": b""}, digest=True), ValueError, "digest= is for shards"),
    (of(TAR, fields="jpg"), TypeError, "fields must be .* a list of names, got 'jpg'"),
    (of(TAR, fields={"x": ["png"]}), TypeError, r"fields must map .*, got 'x' to \['png'\]"),
    (of(TAR, fields=[1]), TypeError, "got 1 to 1"),
    (of(TAR, fields={"": "png"}), TypeError, "got '' to 'png'"),
    (of(TAR, label=5), TypeError, "label must be a field's name, .* or a function, got 5"),
    (of(TAR, label=FromFolder), TypeError, r"FromFolder\(\), .*, got <class"),
    (of(TAR, classes="cd"), TypeError, "classes must be a list of names, got 'cd'"),
    (
        of(TAR, classes={"c": 1, "d": 0}),
        TypeError,
        r"classes must be a list of names, got \{'c': 1",
    ),
    (of(TAR, classes={"c"}), TypeError, r"classes must be a list of names, got \{'c'\}"),
    (of(TAR, classes=[1, 2]), TypeError, r"classes must be a list of names, got \[1, 2\]"),
    (of(TAR, classes=["a", "b", "a"]), ValueError, r"classes must be different .* got \['a'\]"),
    (of(TAR, classes=["a", ""]), ValueError, r"not empty, got \[''\]"),
    (of(TAR, classes=["a"]), ValueError, "the index has no labels: say with label="),
    (of(RECORDS, label="label", classes=["a"]), ValueError, r"outside \[0, 1\) of .*first: \[1,"),
    (
        of(classed("dog", "cat"), label="cls", classes=["dog"]),
        ValueError,
        r"0\.tar, record 1, key 'b': 'cat'",
    ),
    # Bad records
    (of(TAR, exclude=["d-000000.tar"]), TypeError, "exclude must be .* pairs .*, got 'd-000000"),
    (of(TAR, exclude=[7]), TypeError, "exclude must be .*, got 7"),
    (of(TAR, exclude=[(7, 0)]), TypeError, r"exclude must be .*, got \(7, 0\)"),
    (of(TAR, exclude=Report(1, 1, [])), TypeError, "the findings of its report, .* got a Report"),
    *(
        (of(TAR, exclude=[("a.tar", number)]), TypeError, f"number .* integer, got {number!r}")
        for number in ("0", 1.0, True)
    ),
    (of(TAR, exclude=[("nowhere", 0)]), ValueError, "names shards that are not indexed .*verify"),
    (of(TAR, exclude=[("tar/d-000000.tar", 5)]), ValueError, "1 record .* and 0 of them exist"),
    (
        of({"a": b"", "b": b""}, exclude=[BadRecord("files-00000", 1, key="c")]),
        ValueError,
        "names 'c', which is not record 1 of files-00000: make the list again",
    ),
    (
        of(classed("dog", "cat"), exclude=[BadRecord("made/0.tar", 1, key="k")]),
        ValueError,
        r"names 'k', which is not record 1 of made/0\.tar: make the list again",
    ),
    *(
        (
            given(read_bad_records, f"{good}\n{line}"),
            ValueError,
            f"given, line 2: .*{word}.* verify",
        )
        for good in ['{"shard": "b.tar", "record": 2}']
        for line, word in {
            '{"shard": "a.tar"}': "'record'",
            '{"shard": "a.tar", "record": 1, "x": 1}': "'x'",
            '{"shard": 7, "record": 1}': "got",
            '{"shard": "a.tar", "record": -1}': "got",
            '{"shard": "a.tar", "record": "1"}': "got",
            '{"shard": "a.tar", "record": 1, "rest": "no"}': "got",
            '["a.tar", 1]': "must be a mapping",
            "\udcff": "Expecting value",
            "[" * 200_000: "recursion",
        }.items()
    ),
    # What records lack
    (of("empty/*"), ValueError, "no records: all 2 shards are empty"),
    (of(TAR, fields=["jpg"], missing="skip"), ValueError, "no records: .*--missing skip"),
    (lambda _: FromTable([("a", 1)]), TypeError, r"dict .* got a list: .* by to_dict\(\)"),  # type: ignore[arg-type]
    (of(TAR, label=FromTable({}), missing="skip"), ValueError, "or every record is left out"),
    (of(TAR, fields={"x": "y;z"}, missing="empty"), KeyError, r"no record has the fields \['x'\]"),
    (of(RECORDS, lists=["nope"]), KeyError, r"\['nope'\] of fields= or lists=; .*'image'"),
    *(
        (
            of([WHOLE, PLAIN], **options),
            DataCorruptionError,
            rf"a record lacks {lacked}.*0\.tfrecord.*record: 1\n.*\['cls', 'png'\]\n.*{todo}",
        )
        for options, lacked, todo in (
            (
                {"label": "clas"},
                "a label: label='clas' .--label. gives none",
                "--missing skip",
            ),
            (
                {"label": FromJson("jsn", "a")},
                "a label: label=FromJson.* gives none",
                "--missing skip",
            ),
            ({"fields": {"image": "jpg;jpeg"}}, r"the field 'image' \(jpg or jpeg\)", "empty"),
            ({"key": "name"}, "the bytes feature 'name' of key=", "name another"),
        )
    ),
    (
        of([("img", {f"{n:05}.txt": b"x" for n in range(100)})], fields=["txt"]),
        DataCorruptionError,
        r"found: the fields .{,200}\n.*ends at the first dot of its members' names",
    ),
    (of("photos"), DataCorruptionError, "lacks a label.*a.png.*put a file into a folder"),
    (of(classed("3"), label=lambda _: None), DataCorruptionError, "have a function return a label"),
    # Fields
    (of(LABELLED, label="cls"), ValueError, CLASH),
    (of(LABELLED, label="cls", fields=["label", "png"]), ValueError, CLASH),
    (of(LABELLED, label=FromTable({"a": 1})), ValueError, CLASH),
    (of([("a", {f"v{n}": b"" for n in range(257)})]), ValueError, "more than 256 .*with fields="),
    (
        of(*([("k", {f"x{n}-{m}": b"" for m in range(100)})] for n in range(3))),
        ValueError,
        "more than 256 different fields",
    ),
    (of([{"x": 1}, {"x": b"a"}]), ValueError, "'x' .* int64_list in record 0 and bytes"),
    (
        of([{"x": b"a"}], [{"x": 7}]),
        ValueError,
        r"'x' is bytes in .*0\.tfrecord and int64_list in .*1\.tfrecord: .*--field",
    ),
    # What is no label
    *(
        (
            of([("a", {"x": good}), ("b", {"x": text})], label=label),
            DecodeError if callable(label) else DataCorruptionError,
            rf"{problem}.*0\.tar.*record: 1\n.*key: b\n.*{re.escape(found)}.*what to do: ",
        )
        for good, text, label, problem, found in (
            (b"7", b"", "x", IN_FIELD, "''"),
            (b"7", b" \n", "x", IN_FIELD, "''"),
            (b"7", b"caf\xe9", "x", IN_FIELD, r"'caf\udce9'"),
            (b"7", b"\xff" * 999, "x", IN_FIELD, r"'\udcff\udcff...f\udcff\udcff'"),
            (b"7", b"[" * 100_000, FromJson("x"), "'x' is not JSON: maximum recursion", ""),
            (b"7", b"0.5", FromJson("x"), IN_JSON, "0.5"),
            (b"7", b"true", FromJson("x"), IN_JSON, "True"),
            (b"7", b'""', FromJson("x"), IN_JSON, "''"),
            (
                b'{"a": {"b": 7}}',
                b'{"a": {"b": %d}}' % 2**63,
                FromJson("x", "a.b"),
                IN_JSON,
                "9223",
            ),
            (b"7", rb'"\ud800"', FromJson("x"), IN_JSON, r"'\ud800'"),
            (b"7", b"", second(2**80), BY_FUNCTION, str(2**80)),
            (b"7", b"", second(float("nan")), BY_FUNCTION, "nan"),
        )
    ),
    *(
        (of({"a": b"7", "b": b"no"}, label=label), kind, rf"{problem}.*made/b\.x\n +record: 1\n")
        for label, kind, problem in (
            (FromJson("x"), DataCorruptionError, "is not JSON: Expecting value"),
            (second(0.5), DecodeError, BY_FUNCTION),
        )
    ),
    (of(TAR, label=fails), DecodeError, "the function of label= failed: KeyError: 0"),
    *(
        (of([{"x": 1}, {"x": v}], label="x"), DataCorruptionError, f"{IN_FIELD}.*record: 1")
        for v in ([1.5], [2.0**24], [1, 2], [b"a", b"b"])
    ),
    *(
        (of(TAR, label=label), DataCorruptionError, "name one of its keys with FromJson")
        for label in ("json", FromJson("json"), FromJson("json", "object"))
    ),
    # Labels of two kinds
    (
        of(classed("3", None, "cat"), label="cls", background=-1),
        ValueError,
        r"of 3 labels are integers, and this is not: .*'cat'",
    ),
    (
        of(classed("3", "4"), label=lambda s: s["__number__"] or None, background="none"),
        ValueError,
        "background='none' is a name, and labels are integers",
    ),
    (
        of(classed("3", "4", "5"), label=lambda s: [0, None, "cat"][s["__number__"]], background=1),
        ValueError,
        rf"{A_LABEL}.*0\.tar, record 0, key 'a': 0\) and .*record 2, key 'c': 'cat'",
    ),
    (
        of(classed("3"), [("b", {"cls": b"x"})], label=lambda s: "x" if s["__key__"] == "b" else 1),
        ValueError,
        rf"{A_LABEL}.*0\.tar, .*: 1\) and a name \(.*1\.tar, .*: 'x'\)",
    ),
    # Tables
    (of([("a", PLAIN)], [("a", PLAIN)], label=FromTable({"a": 1})), ValueError, "1 keys occur in"),
    (
        of(RECORDS, label=FromTable({"k0": 1}), background=0, fields={"text": "label"}),
        ValueError,
        "joined by key, and these records have no keys: name a feature with key=",
    ),
    (
        of(LABELLED, label=FromTable({"a": None}), background=0),
        ValueError,
        r"the label table: 1 rows have no label, as \['a'\]",
    ),
    (of(RECORDS, label=FromTable({"k0": 1})), LoaderError, "--label-table.* gives none.*key="),
    *(
        (of("tar/d-000000.tar", label=FromTable(rows), **options), kind, word)
        for rows, options, kind, word in (
            ({"k1": 0, "k2": 1, "k4": 0}, {}, LoaderError, "lacks a label: .*record: 0\n.*key: k0"),
            (KEYS | {"x": 0}, {"missing": "skip"}, ValueError, r"6 rows .* no record, as \['k5'"),
            (
                KEYS | {"x": 0},
                {"background": "y"},
                ValueError,
                "the label table: 6 rows have no record",
            ),
            (KEYS | {"k4": float("nan")}, {}, LoaderError, "gives a value that .*key: k4\n.*nan"),
            (
                KEYS | {"k4": None},
                {},
                ValueError,
                r"the label table: 1 rows have no label, as \['k4'\]",
            ),
            ({"k0": 1, "k1": "cat", "k2": 2, "k3": 2, "k4": 2}, {}, ValueError, A_LABEL),
        )
    ),
    (
        given(matched, "key,label\nk1,a\nk2,b\nk1,c\n"),
        ValueError,
        r"given: 1 keys occur twice, as \['k1'\]",
    ),
    (given(matched, "key,label\nk1,a\nk2\n"), ValueError, "given: row 2 has 1 cells, not 2"),
    (given(matched, "key,label\na,nan\n"), ValueError, r"given: 1 rows have no label, as \['a'\]"),
    (given(matched, "a,fat,cat\n"), ValueError, r"must begin with names of .*\['a', 'fat'"),
    (given(matched, "a," + "x" * 200_000), ValueError, "given is not a table"),
    (given(matched, "a,caf\udce9\n"), ValueError, "given is not a table"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of both kinds, sets of shards with gaps, folders of images, an index, other files."""
    world = tmp_path_factory.mktemp("world")
    for name in ("tar", "records", "gaps", "beyond", "empty", "made", "application", "no images"):
        (world / name).mkdir()
    tars(world / "tar", shards=2, each=5)
    tfrecords(world / "records", shards=2, each=5)
    build_index(world / TAR, world / "old.index")
    (world / "photos" / "cat").mkdir(parents=True)
    names = [f"gaps/a-{n:05d}-of-00010" for n in (0, 1, 3, 4, 6, 7, 8)]
    names += [f"beyond/a-0000{n}-of-00002" for n in range(3)]
    for name in (*names, "gaps/b-000000000-of-999999999", "empty/a.tfrecord", "empty/b.tfrecord"):
        (world / name).touch()
    for name in ("photos/a.png", "photos/cat/b.png", "a.tar.gz"):
        (world / name).write_bytes(b"...")
    (world / "application" / MANIFEST).write_text('{"name": "an application"}')
    (world / "link.tar").symlink_to("tar/d-000000.tar")
    (world / "linked").symlink_to("tar")
    return world


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_build_index_refuses_bad_arguments(
    world: Path, call: Call, kind: type[Exception], word: str
) -> None:
    check_refused(world, call, kind, word)
