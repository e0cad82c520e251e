"""The command line: pack, index, verify, info, cat, compare, show, mixing and plan."""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, get_args

from twinfeed.loaders.command_line import _commands
from twinfeed.loaders.command_line._wording import explain, say, show_warning
from twinfeed.loaders.errors import LoaderError, ShardWarning
from twinfeed.loaders.formats._records import CONTAINERS
from twinfeed.loaders.index.options import Missing
from twinfeed.loaders.limits import LIMITS
from twinfeed.loaders.packing import SHARD_BYTES, ShardContainer

_INTERRUPTED: dict[Any, str] = {
    _commands.run_pack: "; nothing was written",
    _commands.run_index: "; finished shards are kept: run it again to go on",
}
_MANY: dict[str, Any] = {"action": "append", "default": []}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

EPILOG = """\
examples:
  twinfeed pack images/ data/ --split train=0.8 --split eval=0.2 --seed 1
  twinfeed index 'data/train-*.tar' --out data/train.index --label cls
  twinfeed info data/train.index
  twinfeed cat data/train.index 0 17
  twinfeed verify data/train.index --jobs 4

Messages name the arguments of the library: "missing='skip'" is --missing skip, "overwrite=True" is
--overwrite, "fields={'text': 'label'}" is --field text=label, "example=False" is --raw.

exit status: 0 all is well, 1 data are bad, missing or changed, 2 wrong usage, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None, /) -> int:
    """Run the command line and return its exit status: 0 fine, 1 bad data, 2 wrong usage.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> folder = mkdtemp()
    >>> _ = pack([{"word": b"to"}], folder)
    >>> main(["cat", f"{folder}/data.index", "0"])
    record 0 (data-00000-of-00001.tfrecord, number 0 at byte offset 28)
      word: 2 bytes, text: to
    0
    """
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", ShardWarning)
            warnings.showwarning = show_warning
            return run(options)
    except KeyboardInterrupt:
        say(f"twinfeed: interrupted{_INTERRUPTED.get(run, '')}", error=True)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (
        LoaderError,
        OSError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        ImportError,
    ) as error:
        say(f"twinfeed: error: {explain(error)}", error=True)
        return 1 if isinstance(error, (LoaderError, OSError, EOFError)) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinfeed",
        description="Pack, index and check shards of records.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"twinfeed {version('twinfeed')}")
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_pack(commands)
    _add_index(commands)
    _add_verify(commands)
    _add_info(commands)
    _add_cat(commands)
    _add_compare(commands)
    _add_show(commands)
    _add_mixing(commands)
    _add_plan(commands)
    return parser


def _command(commands: Any, name: str, text: str, *examples: str) -> Any:
    """Add one command, which a function of _commands.py runs, and return its parser."""
    lines = "\n".join(f"  twinfeed {example}" for example in examples)
    parser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=getattr(_commands, f"run_{name}"))
    return parser


def _add_pack(commands: Any) -> None:
    add = _command(
        commands,
        "pack",
        "Write a folder of images, or the records of an index, to shards and index them. Pairs of "
        "image and annotation, and other samples, are packed in Python: see LooseFiles, and pack.",
        "pack images/ data/ --split train=0.8 --split eval=0.2 --seed 1",
        "pack images/ data/ --container tar --shard-bytes 100M",
        "pack old/train.index new/ --container tar --seed 1 --shards 16",
    ).add_argument
    add("source", help="a folder of images, a folder for each class, or an index")
    add("out", help="the folder to write shards and indexes to")
    containers = get_args(ShardContainer)
    add("--container", choices=containers, default="tfrecord", help="default tfrecord")
    split = "a split, and its number or fraction of the records; needs --seed; may be repeated"
    add("--split", **_MANY, type=_split, metavar="NAME=SIZE", help=split)
    add("--seed", type=int, help="shuffle the records by this seed")
    add("--shards", type=int, default=1, help="at least so many a split; default 1")
    add("--shard-bytes", **_BYTES, default=SHARD_BYTES, help="such as 100M; default 200M")
    add("--shard-records", type=int, help="at most so many records in a shard")
    add("--root", help="the folder of an index's shards, if it is not its own")
    add("--overwrite", action="store_true", help="replace files of the same names")
    add("-q", "--quiet", action="store_true", help="no progress bar")


def _add_index(commands: Any) -> None:
    parser = _command(
        commands,
        "index",
        "Index shards, or a folder of images as it is.",
        "index 'data/train-*.tfrecord' --out data/train.index --label image/class/label",
        "index 'data/{000000..000099}.tar' --out data/x.index --label cls --field 'image=jpg;png'",
        "index images/ --out images.index",
        "index /mnt/readonly/*.tar --out ~/x.index --root /mnt/readonly --jobs 4",
    )
    add, label = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("shards", nargs="+", help="paths, globs, braces; or a folder of images")
    add("--out", required=True, help="the folder of the index")
    label("--label", metavar="FIELD", help="a feature or tar member with the label")
    json_key = "a key of a JSON member: json:object.name; without a key, all of it"
    label("--label-json", metavar="FIELD[:KEY]", help=json_key)
    label("--label-folder", action="store_true", help="the folder is the label")
    label("--label-table", metavar="CSV", help="a table of keys and labels")
    names = "the class names, one a line, in order; or an index, whose class names are taken"
    add("--classes", metavar="FILE", help=names)
    add("--background", help="the label of records that have none")
    field = "keep this field (default: all), under any of these names; may be repeated"
    add("--field", **_MANY, type=_field, metavar="NAME[=A;B]", help=field)
    add("--key", metavar="FEATURE", help="the feature that holds a TFRecord's key")
    lists = "read this feature as a list, even where each record has one value; may be repeated"
    add("--list", dest="lists", **_MANY, metavar="FEATURE", help=lists)
    missing = "a record that lacks a field or label is an error, left out, or has an empty field"
    add("--missing", choices=get_args(Missing), default="error", help=missing)
    add(
        "--exclude",
        metavar="FILE",
        default=(),
        help="bad records to leave out, as listed by verify",
    )
    add("--digest", action="store_true", help="keep a SHA-256 of each shard, for verify to compare")
    _add_reading(add)


def _add_verify(commands: Any) -> None:
    add = _command(
        commands,
        "verify",
        "Check every checksum of an index and its shards, or of shards without an index. A tar has "
        "checksums of its headers only; its index has one of everything.",
        "verify data/train.index --jobs 4",
        "verify 'data/*.tfrecord' --bad-list bad.jsonl",
        "index 'data/*.tfrecord' --out data/x.index --exclude bad.jsonl",
    ).add_argument
    add("target", nargs="+", help="indexes, or shards")
    add("--bad-list", metavar="FILE", help="write the bad records to this file")
    _add_reading(add)


def _add_info(commands: Any) -> None:
    text = "Say what an index holds."
    examples = "info data/train.index", "info data/train.index --json"
    add = _command(commands, "info", text, *examples).add_argument
    _add_opened(add)
    add("--json", action="store_true", help="print JSON, for programs")


def _add_cat(commands: Any) -> None:
    add = _command(
        commands,
        "cat",
        "Show records, by number or key.",
        "cat data/train.index 0 17",
        "cat data/train.index cat/0001 000014",
        "cat data/train.index --key 1003",
        "cat data/train.index 17 --field image > 17.png",
    ).add_argument
    _add_opened(add)
    records = "record numbers (from the end if negative), or keys; 14 is a number, 000014 a key"
    add("records", nargs="*", help=records)
    key = "show all records of this key, which may be a number; may be repeated"
    add("--key", **_MANY, help=key)
    add("--field", help="write the bytes of this field, and nothing else")


def _add_compare(commands: Any) -> None:
    add = _command(
        commands,
        "compare",
        "Run the same batches through TensorFlow and PyTorch; compare what arrives, how fast.",
        "compare data/train.index --batch-size 128 --size 64",
        "compare data/train.index --p 8 --k 4 --seed 1 --batches 200",
    ).add_argument
    _add_fed(add)
    add("--batches", type=int, default=100, help="at most so many; default 100")
    add("--size", type=int, help="decode images, and resize them to this square")
    backends = ["torch", "tensorflow"]
    what = "default torch and tensorflow; numpy is without a framework"
    add("--backends", nargs="+", default=backends, choices=["numpy", *backends], help=what)


def _add_show(commands: Any) -> None:
    add = _command(
        commands,
        "show",
        "Draw a batch of images: a row for each class of a P x K batch, captions below.",
        "show data/train.index --p 8 --k 4 --out batch.png",
        "show data/train.index --batch-size 30 --step 5 --out batch.svg",
    ).add_argument
    _add_fed(add)
    add("--step", type=int, default=0, help="which batch of the epoch; default 0")
    add("--size", type=int, default=128, help="resize images to this square; default 128")
    add("--out", default="batch.png", help="the picture, .png or .svg; default batch.png")


def _add_mixing(commands: Any) -> None:
    add = _command(
        commands,
        "mixing",
        "Draw how well shuffles mix an index: the shard-aware one, a uniform one, and a buffer.",
        "mixing data/train.index --out mixing.png",
        "mixing data/train.index --block 64 --window 16 --buffer 1000 --buffer 10000",
    ).add_argument
    _add_shuffled(add)
    buffer = "a size of shuffle(buffer) to simulate; default a tenth of all; may be repeated"
    add("--buffer", action="append", type=int, metavar="RECORDS", help=buffer)
    add("--out", default="mixing.png", help="the picture, .png or .svg; default mixing.png")


def _add_plan(commands: Any) -> None:
    add = _command(
        commands,
        "plan",
        "Say what an epoch asks of the store of its shards: the shard-aware shuffle, and a uniform "
        "one.",
        "plan data/train.index",
        "plan data/train.index --root s3://bucket/train --cache-bytes 200G",
        "plan data/train.index --block 256 --window 32 --batch-size 512",
    ).add_argument
    _add_shuffled(add)
    cache = "how much of a second epoch a cache of this size holds"
    add("--cache-bytes", **_BYTES, default=0, help=cache)


def _add_shuffled(add: Any) -> None:
    """Add what the commands share that look at shuffles."""
    _add_opened(add)
    add("--block", type=int, help="records of a block; default: about 4 MB")
    add("--window", type=int, help="blocks that are open at once; default: up to 128, 512 MB")
    add("--batch-size", type=int, default=128, help="records a batch; default 128")
    add("--seed", type=int, default=0, help="of the orders; default 0")


def _add_fed(add: Any) -> None:
    """Add what the commands share that draw batches."""
    _add_opened(add)
    add("--batch-size", type=int, default=128, help="records a batch; default 128")
    add("--p", type=int, help="classes a batch, for P x K batches")
    add("--k", type=int, default=4, help="records of each class; default 4")
    add("--seed", type=int, default=0, help="of the order of records; default 0")


def _add_opened(add: Any) -> None:
    """Add what the commands share that open one index."""
    add("index", help="the folder of the index")
    add("--root", help="the folder of the shards, if it is not the index's own")


def _add_reading(add: Any) -> None:
    """Add what `index` and `verify` share."""
    kinds = "what the shards are; default: what their names and first bytes say"
    add("--container", choices=CONTAINERS, help=kinds)
    add("--join", action="store_true", help="put members of a tar's sample together that lie apart")
    raw = "TFRecords that hold no Examples (SequenceExamples, say): index their bytes"
    add("--raw", dest="example", action="store_false", help=raw)
    most = "refuse longer records; default 1 GiB"
    add("--max-record-bytes", **_BYTES, default=LIMITS.record_bytes, help=most)
    add("--root", help="the folder that shard paths are relative to")
    add("--jobs", type=int, default=1, help="processes side by side; default 1")
    add("-q", "--quiet", action="store_true", help="no progress bar")


def _field(text: str) -> tuple[str, str]:
    """Parse NAME or NAME=A;B."""
    name, _, aliases = text.partition("=")
    return name, aliases or name


def _split(text: str) -> tuple[str, int | float]:
    """Parse NAME=SIZE."""
    name, equals, size = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=SIZE, such as train=0.8")
    try:
        return name, float(size) if "." in size else int(size)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{size!r} is neither a number nor a fraction") from None


def _size(text: str) -> int:
    """Parse a number of bytes, such as 100M."""
    match = re.fullmatch(r"(\d+)([kmg]?)b?", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of bytes, such as 100M")
    return int(match[1]) * _UNITS[match[2]]


_BYTES: dict[str, Any] = {"type": _size, "metavar": "BYTES"}
