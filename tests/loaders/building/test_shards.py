"""Names of shards: braces as in bash, globs, and complete numbered sets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import fsspec
import pytest
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from twinfeed.loaders import LoaderError, build_index
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


def test_one_path_is_a_list_of_one(tmp_path: Path) -> None:
    (tmp_path / "{a,b}.tar").touch()
    assert expand(tmp_path / "{a,b}.tar") == [str(tmp_path / "{a,b}.tar")]
    fsspec.filesystem("memory").pipe_file("/names/a[1]?.tar", b"")
    fsspec.filesystem("memory").pipe_file("/names/a1x.tar", b"")
    assert expand("memory://names/a[1]?.tar") == ["memory://names/a[1]?.tar"]
    assert expand("memory://names/a[1]*.tar") == ["memory://names/a1x.tar"]


def test_nothing_and_twice_the_same_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no shard matches"):
        expand(tmp_path / "*.tar")
    with pytest.raises(ValueError, match="at least one file"):
        expand([])
    (tmp_path / "a.tar").touch()
    with pytest.raises(ValueError, match="shards are named twice"):
        expand([tmp_path / "a.tar", tmp_path / "*.tar"])


@pytest.mark.parametrize("again", ["{0}/a.tar", "./a.tar", "../{1}/a.tar", "link.tar", "sub/a.tar"])
def test_one_shard_in_two_spellings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.tar").touch()
    Path("link.tar").symlink_to("a.tar")
    Path("sub").symlink_to(".")
    again = again.format(tmp_path, tmp_path.name)
    with pytest.raises(ValueError, match=rf"shards are named twice \(1: a\.tar and {again}\)$"):
        expand(["a.tar", again])


def test_complete_sets_pass_and_each_set_counts_alone() -> None:
    check_complete([f"train-{n:05d}-of-00003.tar" for n in (2, 0, 1)])
    check_complete(["a-00000-of-00001.tar", "a-00000-of-00001.idx", "plain.tar"])
    with pytest.raises(ValueError, match="val-"):
        check_complete(["a-00000-of-00001", "val-00000-of-00002"])
    with pytest.raises(ValueError, match=r"shard number 2 .* not below 2"):
        check_complete(["a-00000-of-00002", "a-00001-of-00002", "a-00002-of-00002"])
    with pytest.raises(ValueError, match="first: 000000001, 000000002"):  # at once
        check_complete(["a-000000000-of-999999999"])


def test_completeness_can_be_waived(tmp_path: Path) -> None:
    (tmp_path / "a-00001-of-00002.tar").touch()
    assert len(expand(tmp_path / "*.tar", complete=False)) == 1
    with pytest.raises(ValueError, match="1 of 2 missing, first: 00000"):
        expand(tmp_path / "*.tar")


def test_a_folder_of_a_store_asks_for_a_pattern(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match="and not a shard"):
        build_index("memory://none/", tmp_path / "x.index")
