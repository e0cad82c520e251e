"""`main` parses the arguments of a command, runs it, and prints its errors."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from textwrap import fill
from typing import Any, get_args

from twinfeed.loaders.building.labels import FromFile, FromFolder, FromJson
from twinfeed.loaders.command_line import _commands
from twinfeed.loaders.command_line._feeds import DEFAULT_K
from twinfeed.loaders.command_line._printing import explain, print_lines, show_warning
from twinfeed.loaders.errors import LoaderError, ShardWarning
from twinfeed.loaders.formats.records import CONTAINERS
from twinfeed.loaders.index.options import Missing
from twinfeed.loaders.packing import SHARD_BYTES, ShardContainer
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.tools.backends import BACKENDS

_INTERRUPTED: dict[Any, str] = {
    _commands.run_pack: "; nothing was written",
    _commands.run_index: "; finished shards are kept: run it again to go on",
}

EPILOG = """\
examples:
  twinfeed pack images/ data/ --split train=0.8 --split eval=0.2 --seed 1
  twinfeed index 'data/train-*.tar' --out data/train.index --label cls
  twinfeed info data/train.index
  twinfeed cat data/train.index 0 17
  twinfeed verify data/train.index --jobs 4

exit status: 0 all is well, 1 data are bad, missing or changed (or verify, compare, plan or diff
found something), 2 wrong usage, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None, /) -> int:
    """Run a command and return its exit status: 0 success, 1 bad data, 2 wrong usage.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> folder = mkdtemp()
    >>> _ = pack([{"word": b"to"}], folder)
    >>> main(["cat", f"{folder}/data.index", "0"])
    record 0 (data-00000-of-00001.tfrecord, number 0)
      word: 2 bytes at byte 28, text: to
    0
    """
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int | None] = options.run
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", ShardWarning)
            warnings.showwarning = show_warning
            return run(options) or 0
    except KeyboardInterrupt:
        print_lines(f"twinfeed: interrupted{_INTERRUPTED.get(run, '')}", error=True)
        return 130
    except BrokenPipeError:  # the program that reads the output has ended, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (LoaderError, OSError, EOFError) as error:
        print_lines(f"twinfeed: error: {explain(error)}", error=True)
        return 1
    except (ValueError, TypeError, LookupError, ImportError) as error:
        print_lines(f"twinfeed: error: {explain(error)}", error=True)
        return 2


class _Command(argparse.ArgumentParser):
    """The parser of a command. Its options may stand between its positional arguments."""

    _intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, where options may stand between the positional arguments.

        Unknown arguments end the program with a message.
        """
        if self._intermixed:  # before Python 3.13, the call below calls this method again
            return super().parse_known_args(args, namespace)
        self._intermixed = True
        parsed, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with a subparser for each command."""
    parser = argparse.ArgumentParser(
        prog="twinfeed",
        description="Pack records into shards, index and check shards, and look into them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"twinfeed {version('twinfeed')}")
    commands = parser.add_subparsers(metavar="command", required=True, parser_class=_Command)
    for add in (
        _pack,
        _index,
        _verify,
        _info,
        _cat,
        _compare,
        _show,
        _mixing,
        _plan,
        _who,
        _when,
        _diff,
    ):
        add(commands)
    return parser


def _command(commands: Any, name: str, text: str, *examples: str) -> Any:
    """Add the parser of a command, which `run_NAME` of _commands.py runs, and return it."""
    lines = "\n".join(f"  twinfeed {example}" for example in examples)
    parser = commands.add_parser(
        name,
        help=text.partition(". ")[0].removesuffix("."),
        description=fill(text, 80),
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=getattr(_commands, f"run_{name}"))
    return parser


def _add(parser: Any, argument: str, text: str, default: Any = None, /, **kwargs: Any) -> None:
    """Add an argument to a parser, such as "--split NAME=SIZE...".

    Three dots mean that it may be repeated. The name of the value, such as "N", determines its type
    (see `_TYPES`). An option without a value is a flag. The default is added to the help `text`.
    """
    names, _, value = argument.partition(" ")
    if value:
        kind = value.removesuffix("...")
        kwargs = {"metavar": kind, "type": _TYPES.get(kind, str), **kwargs}
    elif names[0] == "-" and not kwargs and default is None:
        kwargs = {"action": "store_true"}
    if value.endswith("..."):
        text, kwargs = f"{text}; may be repeated", {**kwargs, "action": "append", "default": []}
    if default is not None:
        text, kwargs = f"{text}; default {default}", {**kwargs, "default": default}
    parser.add_argument(*names.split("/"), help=text, **kwargs)


def _pack(commands: Any) -> None:
    """Add the parser of `twinfeed pack`."""
    parser = _command(
        commands,
        "pack",
        "Write a folder of images, the records of an index, or those of compressed shards, to "
        "shards, and index the shards. Images are not decoded. Pairs of image and annotation, and "
        "other samples, are packed in Python: see LooseFiles and pack of twinfeed.loaders.",
        "pack images/ data/ --split train=0.8 --split eval=0.2 --seed 1",
        "pack images/ data/ --container tar --shard-bytes 100M",
        "pack old/train.index new/ --container tar --seed 1 --shards 16",
        "pack 'old/*.tar.gz' new/ --container tar --label cls",
    )
    add = partial(_add, parser)
    kinds = "a folder with a folder of images for each class, a folder of images, or an index"
    add("source", f"{kinds}; or compressed shards, by paths or patterns", nargs="+")
    add("out", "the folder to write shards and indexes to")
    add("--container", "what the shards are to be", "tfrecord", choices=get_args(ShardContainer))
    _add_label_options(parser)
    add("--key FEATURE", "the feature that holds a TFRecord's key")
    _add_raw_option(add)
    split = "a split, and its number of records, or its fraction of them; needs --seed"
    add("--split NAME=SIZE...", split)
    add("--seed N", "shuffle the records by this seed; default: their own order")
    add("--shards N", "the minimum number of shards of each split", 1)
    nbytes = "the approximate size of a shard, such as 100M; default 200M"
    add("--shard-bytes BYTES", nbytes, default=SHARD_BYTES)
    add("--shard-records N", "the maximum number of records in a shard")
    add("--root FOLDER", "the folder or the URL of an index's shards, if it is not the index's own")
    add("--overwrite", "replace what was packed under the same names")
    add("-q/--quiet", "no progress bar")


def _add_label_options(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """Add the options that say where labels come from, of which only one may be given.

    Returns:
        A function that adds another such option.
    """
    add = partial(_add, parser.add_mutually_exclusive_group())
    add("--label FIELD", "the feature or tar member that holds the label")
    json_key = "a key of a JSON member: json:object.name; without a key, all of it"
    add("--label-json FIELD[:KEY]", json_key, dest="label")
    folder = "the label is the folder of a shard, or in a tar sample's key; for images by default"
    name = r"the label is the group of a regular expression in a file's name: 'class_(\d+)'"
    add("--label-file REGEX", name, dest="label")
    add("--label-folder", folder, dest="label", action="store_const", const=FromFolder())
    return add


def _index(commands: Any) -> None:
    """Add the parser of `twinfeed index`."""
    parser = _command(
        commands,
        "index",
        "Index shards, or a folder of images as it is. Nothing is copied or converted.",
        "index 'data/train-*.tfrecord' --out data/train.index --label image/class/label",
        "index 'data/{000000..000099}.tar' --out data/x.index --label cls --field 'image=jpg;png'",
        "index images/ --out images.index",
        "index /mnt/readonly/*.tar --out ~/x.index --root /mnt/readonly --jobs 4",
    )
    add = partial(_add, parser)
    add("shards", "paths, globs, braces, URLs; or a folder of images", nargs="+")
    add("--out FOLDER", "the folder to make, or the index to replace", required=True)
    _add_label_options(parser)("--label-table FILE", "a CSV or TSV file of keys and labels")
    names = "the class names, one a line, in order; or an index, whose class names are taken"
    add("--classes FILE", names)
    add("--background LABEL", "the label of records that have none")
    add("--field NAME[=A;B]...", "keep this field (default: all), under any of these names")
    add("--key FEATURE", "the feature that holds a TFRecord's key")
    lists = "read this feature as a list, even where each record has one value"
    add("--list FEATURE...", lists, dest="lists")
    missing = (
        "a record that lacks a label, or a field that --field names, is an error, is left out "
        "(skip), or has an empty field; any other field may be missing"
    )
    add("--missing", missing, "error", choices=get_args(Missing))
    bad = "leave out the bad records of this file, which verify --bad-list has written"
    add("--exclude FILE", bad, default=())
    few = "take a numbered set (-00003-of-00010) of which some are missing"
    add("--incomplete", few, dest="complete", action="store_false")
    add("--digest", "keep a SHA-256 of each shard, for verify to compare")
    _add_reading_options(add)


def _verify(commands: Any) -> None:
    """Add the parser of `twinfeed verify`."""
    parser = _command(
        commands,
        "verify",
        "Check every checksum of an index and its shards, or of shards without an index. A tar has "
        "checksums of its headers only; its index has one of everything. Images are not decoded. "
        "A warning ends with status 1, as bad data do.",
        "verify data/train.index --jobs 4",
        "verify 'data/*.tfrecord' --bad-list bad.jsonl",
        "index 'data/*.tfrecord' --out data/x.index --exclude bad.jsonl",
    )
    add = partial(_add, parser)
    add("target", "indexes, or shards", nargs="+")
    add("--bad-list FILE", "write the bad records to this file, for index --exclude")
    _add_reading_options(add)


def _add_raw_option(add: Any) -> None:
    """Add the option --raw by the function `add`."""
    raw = "read TFRecords as bytes: for records that are no Examples, such as SequenceExamples"
    add("--raw", raw, dest="example", action="store_false")


def _add_reading_options(add: Any) -> None:
    """Add the options of `index` and `verify` for how shards are read, by the function `add`."""
    kinds = "what the shards are; default: what their names and first bytes say"
    add("--container", kinds, choices=CONTAINERS)
    add("--join", "join the members of a tar's sample that are not consecutive")
    _add_raw_option(add)
    maximum = "refuse longer records; default 1 GiB"
    add("--max-record-bytes BYTES", maximum, default=LIMITS.record_bytes)
    root = (
        "the folder or the URL that contains all shards; default: the one that holds the index, "
        "or for shards at URLs the nearest that holds them all"
    )
    add("--root FOLDER", root)
    add("--jobs N", "the number of parallel processes", 1)
    add("-q/--quiet", "no progress bar")


def _index_command(
    commands: Any, name: str, text: str, *examples: str, draws: str = ""
) -> Callable[..., None]:
    """Add the parser of a command on an index, with the arguments that such commands share.

    Args:
        commands: of the main parser.
        name: of the command.
        text: its description.
        examples: lines of its help.
        draws: adds the options for a sampler: "batches" for random or P x K batches, "shuffles" for
            the shard-aware shuffle.

    Returns:
        A function that adds a further argument.
    """
    add = partial(_add, _command(commands, name, text, *examples))
    add("index", "the folder or the URL of the index")
    add("--root FOLDER", "the folder or the URL of the shards, if it is not the index's own")
    if draws:
        add("--batch-size N", "records of a batch", 128)
        add("--seed N", "the seed of the order of records", 0)
    if draws == "batches":
        add("--p N", "draw P x K batches, with so many classes each; --batch-size has no say")
        add("--field NAME", "the field that holds the images; default: the only one that does")
        add("--k N", f"records of each class of a P x K batch; needs --p; default {DEFAULT_K}")
        small = "of classes with fewer than K records, use records again, or leave the classes out"
        add("--small", small, "repeat", choices=["repeat", "drop"])
    if draws == "shuffles":
        add("--block N", "records of a block; default: about 4 MB, less of small data")
        add("--window N", "blocks that are open at once; default: up to 128, 512 MB")
    return add


def _info(commands: Any) -> None:
    """Add the parser of `twinfeed info`."""
    examples = "info data/train.index", "info data/train.index --json"
    add = _index_command(commands, "info", "Say what an index holds.", *examples)
    add("--json", "print JSON, for programs")


def _cat(commands: Any) -> None:
    """Add the parser of `twinfeed cat`."""
    add = _index_command(
        commands,
        "cat",
        "Show records, by number or key.",
        "cat data/train.index 0 17",
        "cat data/train.index cat/0001 000014",
        "cat data/train.index --key 1003",
        "cat data/train.index 17 --field image > 17.png",
    )
    records = "record numbers (from the end if negative), or keys; 14 is a number, 000014 a key"
    add("records", records, nargs="*")
    add("--key KEY...", "show all records of this key, which may be a number")
    add("--field NAME", "write the bytes of this field, and nothing else")


def _compare(commands: Any) -> None:
    """Add the parser of `twinfeed compare`."""
    add = _index_command(
        commands,
        "compare",
        "Run the same batches through TensorFlow and PyTorch; compare what arrives, and how fast. "
        "Each framework must be installed.",
        "compare data/train.index --batch-size 128 --size 64",
        "compare data/train.index --p 8 --k 4 --seed 1 --batches 200",
        draws="batches",
    )
    add("--batches N", "the maximum number of batches", 100)
    add("--size N", "decode images, and resize them to N x N pixels; default: as bytes")
    backends = "what to run; default torch and tensorflow; numpy is without a framework"
    both = ["torch", "tensorflow"]
    add("--backends", backends, nargs="+", choices=[*BACKENDS], default=both)


def _show(commands: Any) -> None:
    """Add the parser of `twinfeed show`."""
    add = _index_command(
        commands,
        "show",
        "Draw a batch of images: a row for each class of a P x K batch, captions below. Needs "
        "the extras images and pictures.",
        "show data/train.index --p 8 --k 4 --out batch.png",
        "show data/train.index --batch-size 30 --step 5 --out batch.svg",
        draws="batches",
    )
    add("--step N", "which batch of the epoch", 0)
    size = "fit images into N x N pixels, with zeros beside; DecodeImage of a feed stretches them"
    add("--size N", size, 128)
    add("--out FILE", "the picture, .png or .svg", "batch.png")


def _mixing(commands: Any) -> None:
    """Add the parser of `twinfeed mixing`."""
    add = _index_command(
        commands,
        "mixing",
        "Draw how well shuffles mix an index: the shard-aware one, a uniform one, and a buffer. "
        "Needs the extra pictures.",
        "mixing data/train.index --out mixing.png",
        "mixing data/train.index --block 64 --window 16 --buffer 1000 --buffer 10000",
        draws="shuffles",
    )
    add("--buffer N...", "a size of shuffle(buffer) to simulate; default a tenth of all records")
    add("--out FILE", "the picture, .png or .svg", "mixing.png")


def _plan(commands: Any) -> None:
    """Add the parser of `twinfeed plan`."""
    _index_command(
        commands,
        "plan",
        "Say what an epoch asks of the store of its shards: with a uniform shuffle, and with the "
        "shard-aware one. Nothing is read.",
        "plan data/train.index",
        "plan data/train.index --root s3://bucket/train",
        "plan data/train.index --block 256 --window 32 --batch-size 512",
        draws="shuffles",
    )


def _who(commands: Any) -> None:
    """Add the parser of `twinfeed who`."""
    add = _ledger_command(
        commands,
        "who",
        "Say which records made a step of a run. The run's loader had a ledger.",
        "who run/ledger.jsonl --feed train.py:feed --step 340",
        "who run/ledger.jsonl --feed train.py:feed --step 340 --rank 3",
    )
    add("--step N", "the step, counted over all epochs", required=True)


def _when(commands: Any) -> None:
    """Add the parser of `twinfeed when`."""
    add = _ledger_command(
        commands,
        "when",
        "Say which steps of a run had a record. The run's loader had a ledger.",
        "when run/ledger.jsonl --feed train.py:feed --record 17",
        "when run/ledger.jsonl --feed train.py:feed --record class3/13",
    )
    add("--record RECORD...", "a record number (from the end if negative), or a key")
    add("--key KEY...", "a key, which may be a number")


def _ledger_command(commands: Any, name: str, text: str, *examples: str) -> Callable[..., None]:
    """Add the parser of a command on a ledger and its feed; return a function to add arguments."""
    add = partial(_add, _command(commands, name, text, *examples))
    add("ledger", "the path that the loader was given as ledger=")
    add("--feed FILE.py:NAME", "the feed of the run; the file is imported", required=True)
    add("--rank N", "a rank's part of the batch; default: the global batch")
    return add


def _diff(commands: Any) -> None:
    """Add the parser of `twinfeed diff`."""
    parser = _command(
        commands,
        "diff",
        "Say from which step on two runs had other records. No shards are needed. The exit status "
        "is 1 if there is such a step.",
        "diff a/ledger.jsonl b/ledger.jsonl",
    )
    add = partial(_add, parser)
    add("first", "the ledger of a run")
    add("second", "the ledger of another run")


def _parse_field(text: str) -> tuple[str, str]:
    """Parse the value of --field, NAME or NAME=A;B, to the name and its aliases "A;B"."""
    name, _, aliases = text.partition("=")
    return name, aliases or name


def _parse_json_label(text: str) -> FromJson:
    """Parse the value of --label-json, FIELD or FIELD:KEY."""
    field, _, key = text.partition(":")
    return FromJson(field, key)


def _parse_split(text: str) -> tuple[str, int | float]:
    """Parse the value of --split, NAME=SIZE, to the name and the size: an int, or a fraction."""
    name, equals, size = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=SIZE, such as train=0.8")
    try:
        return name, float(size) if "." in size else int(size)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{size!r} is neither a number nor a fraction") from None


def _with_message(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a function that parses an option, so that argparse shows the text of its ValueError."""

    def parse_or_explain(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_or_explain


_TYPES: dict[str, Callable[[str], Any]] = {
    "BYTES": _with_message(checks.bytes_of),
    "FIELD[:KEY]": _parse_json_label,
    "N": int,
    "REGEX": _with_message(FromFile),
    "NAME=SIZE": _parse_split,
    "NAME[=A;B]": _parse_field,
}
