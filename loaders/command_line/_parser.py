"""The command line: pack, index, verify, info, cat and compare."""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from twinfeed.loaders.command_line._commands import (
    run_cat,
    run_compare,
    run_index,
    run_info,
    run_pack,
    run_verify,
)
from twinfeed.loaders.command_line._wording import explain, say, show_warning
from twinfeed.loaders.errors import LoaderError, ShardWarning
from twinfeed.loaders.limits import LIMITS
from twinfeed.loaders.packing import SHARD_BYTES

_INTERRUPTED: dict[Any, str] = {
    run_pack: "; nothing was written",
    run_index: "; finished shards are kept: run it again to go on",
}
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
    except (LoaderError, OSError, EOFError) as error:
        return _fail(error, 1)
    except (ValueError, TypeError, LookupError, ImportError) as error:
        return _fail(error, 2)


def _fail(error: Exception, status: int) -> int:
    """Say in one line what is wrong and what to do."""
    say(f"twinfeed: error: {explain(error)}", error=True)
    return status


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="twinfeed",
        description="Pack, index and check shards of records.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"twinfeed {version('twinfeed')}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in (_add_pack, _add_index, _add_verify, _add_info, _add_cat, _add_compare):
        add(commands)
    return parser


def _command(commands: Any, name: str, run: Any, text: str, *examples: str) -> Any:
    """Add one command, with its examples."""
    lines = "\n".join(f"  twinfeed {example}" for example in examples)
    parser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _add_pack(commands: Any) -> None:
    """Add `pack`."""
    parser = _command(
        commands,
        "pack",
        run_pack,
        "Write a folder of images, or the records of an index, to shards and index them. Pairs of "
        "image and annotation, and other samples, are packed in Python: see LooseFiles, and pack.",
        "pack images/ data/ --split train=0.8 --split eval=0.2 --seed 1",
        "pack images/ data/ --container tar --shard-bytes 100M",
        "pack old/train.index new/ --container tar --seed 1 --shards 16",
    )
    parser.add_argument("source", help="a folder of images, a folder for each class, or an index")
    parser.add_argument("out", help="the folder to write shards and indexes to")
    parser.add_argument(
        "--container",
        choices=("tfrecord", "tar"),
        default="tfrecord",
        help="what the shards are; default tfrecord",
    )
    parser.add_argument(
        "--split",
        action="append",
        type=_split,
        metavar="NAME=SIZE",
        help="a split, and its number or fraction of the records; needs --seed; may be repeated",
    )
    parser.add_argument("--seed", type=int, help="shuffle the records by this seed")
    parser.add_argument("--shards", type=int, default=1, help="at least so many a split; default 1")
    parser.add_argument(
        "--shard-bytes",
        type=_size,
        default=SHARD_BYTES,
        metavar="BYTES",
        help="such as 100M; default 200M",
    )
    parser.add_argument("--shard-records", type=int, help="at most so many records in a shard")
    parser.add_argument("--root", help="the folder of an index's shards, if it is not its own")
    parser.add_argument("--overwrite", action="store_true", help="replace files of the same names")
    _add_quiet(parser)


def _add_index(commands: Any) -> None:
    """Add `index`."""
    parser = _command(
        commands,
        "index",
        run_index,
        "Index shards, or a folder of images as it is.",
        "index 'data/train-*.tfrecord' --out data/train.index --label image/class/label",
        "index 'data/{000000..000099}.tar' --out data/x.index --label cls --field 'image=jpg;png'",
        "index images/ --out images.index",
        "index /mnt/readonly/*.tar --out ~/x.index --root /mnt/readonly --jobs 4",
    )
    parser.add_argument("shards", nargs="+", help="paths, globs, braces; or a folder of images")
    parser.add_argument("--out", "--index-dir", required=True, help="the folder of the index")
    labels = parser.add_mutually_exclusive_group()
    labels.add_argument("--label", metavar="FIELD", help="a feature or tar member with the label")
    labels.add_argument(
        "--label-json",
        metavar="FIELD[:KEY]",
        help="a key of a JSON member: json:object.name; without a key, all of it",
    )
    labels.add_argument("--label-folder", action="store_true", help="the folder is the label")
    labels.add_argument("--label-table", metavar="CSV", help="a table of keys and labels")
    parser.add_argument(
        "--classes",
        metavar="FILE",
        help="the class names, one a line, in order; or an index, whose class names are taken",
    )
    parser.add_argument("--background", help="the label of records that have none")
    parser.add_argument(
        "--field",
        action="append",
        type=_field,
        metavar="NAME[=A;B]",
        help="keep this field (default: all), under any of these names; may be repeated",
    )
    parser.add_argument("--key", metavar="FEATURE", help="the feature that holds a TFRecord's key")
    parser.add_argument(
        "--list",
        action="append",
        metavar="FEATURE",
        help="read this feature as a list, even where each record has one value; may be repeated",
    )
    parser.add_argument(
        "--missing",
        choices=("error", "skip", "empty"),
        default="error",
        help="a record that lacks a field or label is an error, left out, or has an empty field",
    )
    parser.add_argument(
        "--exclude", metavar="FILE", help="bad records to leave out, as listed by verify"
    )
    parser.add_argument(
        "--digest", action="store_true", help="keep a SHA-256 of each shard, for verify to compare"
    )
    _add_reading(parser)


def _add_verify(commands: Any) -> None:
    """Add `verify`."""
    parser = _command(
        commands,
        "verify",
        run_verify,
        "Check every checksum of an index and its shards, or of shards without an index. A tar has "
        "checksums of its headers only; its index has one of everything.",
        "verify data/train.index --jobs 4",
        "verify 'data/*.tfrecord' --bad-list bad.jsonl",
        "index 'data/*.tfrecord' --out data/x.index --exclude bad.jsonl",
    )
    parser.add_argument("target", nargs="+", help="indexes, or shards")
    parser.add_argument("--bad-list", metavar="FILE", help="write the bad records to this file")
    _add_reading(parser)


def _add_info(commands: Any) -> None:
    """Add `info`."""
    parser = _command(
        commands,
        "info",
        run_info,
        "Say what an index holds.",
        "info data/train.index",
        "info data/train.index --json",
    )
    parser.add_argument("index", help="the folder of the index")
    parser.add_argument("--root", help="the folder of the shards, if it is not the index's own")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_cat(commands: Any) -> None:
    """Add `cat`."""
    parser = _command(
        commands,
        "cat",
        run_cat,
        "Show records, by number or key.",
        "cat data/train.index 0 17",
        "cat data/train.index cat/0001 000014",
        "cat data/train.index --key 1003",
        "cat data/train.index 17 --field image > 17.png",
    )
    parser.add_argument("index", help="the folder of the index")
    parser.add_argument(
        "records",
        nargs="*",
        help="record numbers (from the end if negative), or keys; 14 is a number, 000014 a key",
    )
    parser.add_argument(
        "--key",
        action="append",
        help="show all records of this key, which may be a number; may be repeated",
    )
    parser.add_argument("--field", help="write the bytes of this field, and nothing else")
    parser.add_argument("--root", help="the folder of the shards, if it is not the index's own")


def _add_compare(commands: Any) -> None:
    """Add `compare`."""
    parser = _command(
        commands,
        "compare",
        run_compare,
        "Run the same batches through TensorFlow and PyTorch; compare what arrives, how fast.",
        "compare data/train.index --batch-size 128 --size 64",
        "compare data/train.index --p 8 --k 4 --seed 1 --batches 200",
    )
    parser.add_argument("index", help="the folder of the index")
    parser.add_argument("--batch-size", type=int, default=128, help="records a batch; default 128")
    parser.add_argument("--p", type=int, help="classes a batch, for P x K batches")
    parser.add_argument("--k", type=int, default=4, help="records of each class; default 4")
    parser.add_argument("--seed", type=int, default=0, help="of the order of records; default 0")
    parser.add_argument("--batches", type=int, default=100, help="at most so many; default 100")
    parser.add_argument("--size", type=int, help="decode images, and resize them to this square")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["torch", "tensorflow"],
        choices=("numpy", "torch", "tensorflow"),
        help="what to compare; default torch and tensorflow; numpy is without a framework",
    )
    parser.add_argument("--root", help="the folder of the shards, if it is not the index's own")


def _add_reading(parser: Any) -> None:
    """Add what `index` and `verify` share."""
    parser.add_argument(
        "--container",
        choices=("tfrecord", "tar", "files"),
        help="what the shards are; default: what their names and first bytes say",
    )
    parser.add_argument(
        "--join", action="store_true", help="put parts of a tar's sample together that lie apart"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="TFRecords that hold no Examples (SequenceExamples, say): index their bytes",
    )
    parser.add_argument(
        "--max-record-bytes",
        type=_size,
        default=LIMITS.record_bytes,
        metavar="BYTES",
        help="refuse longer records; default 1 GiB",
    )
    parser.add_argument("--root", help="the folder that shard paths are relative to")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side; default 1")
    _add_quiet(parser)


def _add_quiet(parser: Any) -> None:
    """Add `--quiet`."""
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


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
