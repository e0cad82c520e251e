"""Names of shards: braces as in bash, globs, and complete numbered sets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import fsspec
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from twinfeed.loaders.building.shards import check_complete, expand, expand_braces

numbers = st.tuples(st.integers(-30, 30), st.integers(-30, 30), st.integers(-4, 4).filter(bool))
padded = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 4))
word = st.text("abc-.", max_size=3)
piece = st.one_of(
    word,
    numbers.map(lambda n: f"{{{n[0]}..{n[1]}..{n[2]}}}"),
    padded.map(lambda n: f"{{{n[0]:0{n[2]}d}..{n[1]:0{n[2]}d}}}"),
    st.lists(word, min_size=2, max_size=3).map(lambda words: "{" + ",".join(words) + "}"),
)


@given(pieces=st.lists(piece, max_size=3))
def test_braces_expand_as_in_braceexpand(pieces: list[str]) -> None:
    pattern = "".join(pieces)
    assert expand_braces(pattern) == list(braceexpand(pattern, escape=False))


def test_braces_expand_as_in_bash() -> None:
    patterns = ["{000..009}", "a{08..10}.tar", "{3..1}{x,y}", "{0..9..3}", "{a}b", "{}", "{a,}"]
    for pattern in patterns:
        bash = subprocess.run(
            ["bash", "-c", f"for word in x{pattern}; do echo $word; done"],
            check=True,
            capture_output=True,
            text=True,
        )
        assert expand_braces("x" + pattern) == bash.stdout.split()


def test_glob_braces_and_lists_keep_their_order(tmp_path: Path) -> None:
    for name in ("b-1.tar", "b-0.tar", "a-1.tar", "[x].tar"):
        (tmp_path / name).touch()
    found = expand([tmp_path / "{b,a}-*.tar", tmp_path / "[x].tar"])
    names = [Path(path).name for path in found]
    assert names == ["b-0.tar", "b-1.tar", "a-1.tar", "[x].tar"]
    in_order = [str(tmp_path / f"{name}.tar") for name in ("a-1", "b-0", "b-1")]
    assert expand({*in_order}) == in_order  # a set has another order in each process


def test_single_path_expands_to_a_list_of_one(tmp_path: Path) -> None:
    (tmp_path / "{a,b}.tar").touch()
    assert expand(tmp_path / "{a,b}.tar") == [str(tmp_path / "{a,b}.tar")]
    fsspec.filesystem("memory").pipe_file("/names/a[1]?.tar", b"")
    fsspec.filesystem("memory").pipe_file("/names/a1x.tar", b"")
    assert expand("memory://names/a[1]?.tar") == ["memory://names/a[1]?.tar"]
    assert expand("memory://names/a[1]*.tar") == ["memory://names/a1x.tar"]


def test_check_complete_counts_each_set_by_itself() -> None:
    check_complete([f"train-{n:05d}-of-00003.tar" for n in (2, 0, 1)])
    check_complete(["a-00000-of-00001.tar", "a-00000-of-00001.idx", "plain.tar"])


def test_expand_with_complete_false_accepts_missing_shards(tmp_path: Path) -> None:
    (tmp_path / "a-00001-of-00002.tar").touch()
    assert len(expand(tmp_path / "*.tar", complete=False)) == 1
