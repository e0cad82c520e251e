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

from twinfeed.loaders.building.labels import FromExample, FromFile, FromFolder, FromJson
from twinfeed.loaders.command_line import _commands
from twinfeed.loaders.command_line._printing import error_line, print_lines, show_warning
from twinfeed.loaders.errors import LoaderError, ShardWarning
from twinfeed.loaders.formats.records import CONTAINERS
from twinfeed.loaders.index.options import Missing
from twinfeed.loaders.packing import SHARD_BYTES, ShardContainer
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.tools.backends import BACKENDS

_INTERRUPTED: dict[Any, str] = {
    _commands.run_pack: "; nothing was written",
    _commands.run_index: "; finished shards are kept: run the command again to continue",
}

EPILOG = """\
twinfeed COMMAND --help has examples.

exit status: 0 all is well, 1 data are bad, missing or changed (or verify,
compare or diff found something), 2 wrong usage, 130 interrupted
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
        print_lines(f"twinfeed: error: {error_line(error)}", error=True)
        return 1
    except (ValueError, TypeError, LookupError, ImportError) as error:
        print_lines(f"twinfeed: error: {error_line(error)}", error=True)
        return 2


class _Command(argparse.ArgumentParser):
    """The parser of a command, whose options may come between its positional arguments."""

    _intermixed = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, where options may come between the positional arguments.

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
    _add_pack_parser(commands)
    _add_index_parser(commands)
    _add_verify_parser(commands)
    _add_info_parser(commands)
    _add_cat_parser(commands)
    _add_compare_parser(commands)
    _add_show_parser(commands)
    _add_mixing_parser(commands)
    _add_plan_parser(commands)
    _add_who_parser(commands)
    _add_when_parser(commands)
    _add_diff_parser(commands)
    return parser


def _command_parser(commands: Any, name: str, text: str, *examples: str) -> Any:
    """Add the parser of a command, and return it. `run_NAME` of _commands.py runs the command.

    `text` is the description, of which the list of commands shows the first sentence.
    """
    lines = "\n".join(f"  twinfeed {example}" for example in examples)
    parser = commands.add_parser(
        name,
        help=text.partition(". ")[0].removesuffix("."),
        description=fill(text, 80),
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for metavar, parse in _TYPES.items():  # argparse then says: invalid 'NAME=SIZE' value
        parser.register("type", metavar, parse)
    parser.set_defaults(run=getattr(_commands, f"run_{name}"))
    return parser


def _add(parser: Any, argument: str, text: str, *, shown: Any = None, **kwargs: Any) -> None:
    """Add an argument to a parser, described by a string as in the usage of a command.

    - "out" is a positional argument, "--overwrite" a flag, and "-q/--quiet" a flag with two names.
    - "--seed N" is an option with a value. The name of the value determines its type, by `_TYPES`:
      N is an int. Other values are strings.
    - "--split NAME=SIZE..." is an option that may be repeated. Its values become a list.

    Args:
        parser: the parser of a command.
        argument: the description of the argument.
        text: the help of the argument.
        shown: the default value, if the help shall end with "; default VALUE".
        kwargs: further arguments for `parser.add_argument`, such as `choices`, or `default` for a
            default value that the help shall not show.
    """
    names, _, value = argument.partition(" ")
    if value:
        metavar = value.removesuffix("...")
        kwargs = {"metavar": metavar, "type": metavar if metavar in _TYPES else str, **kwargs}
    elif names[0] == "-" and not kwargs and shown is None:
        kwargs = {"action": "store_true"}
    if value.endswith("..."):
        text, kwargs = f"{text}; may be repeated", {**kwargs, "action": "append", "default": []}
    if shown is not None:
        text, kwargs = f"{text}; default {shown}", {**kwargs, "default": shown}
    parser.add_argument(*names.split("/"), help=text, **kwargs)


def _add_pack_parser(commands: Any) -> None:
    """Add the parser of `twinfeed pack`."""
    parser = _command_parser(
        commands,
        "pack",
        "Write a folder of images, the records of an index, or those of compressed shards, to "
        "shards, and index the shards. Images are not decoded. Pairs of image and annotation, and "
        "other samples, are packed in Python: see LooseFiles and pack of twinfeed.loaders.",
        "pack images/ data/ --split train=0.8 --split eval=0.2 --seed 1",
        "pack old/train.index new/ --container tar --seed 1 --shards 16",
        "pack 'old/*.tar.gz' new/ --container tar --label cls",
    )
    add = partial(_add, parser)
    add("source", "a folder of images, or of classes; an index; or compressed shards", nargs="+")
    add("out", "the folder to write shards and indexes to")
    add("--container", "the shard format", shown="tfrecord", choices=get_args(ShardContainer))
    _add_label_options(parser)
    add("--key FEATURE", "the feature that holds a TFRecord's key")
    _add_raw_option(add)
    add("--split NAME=SIZE...", "a split: a number of records, or a fraction; needs --seed")
    add("--seed N", "shuffle the records by this seed; default: keep their order")
    add("--shards N", "the minimum number of shards of each split", shown=1)
    add("--shard-bytes BYTES", "about the size of a shard; default 200M", default=SHARD_BYTES)
    add("--shard-records N", "the maximum number of records in a shard")
    add("--root FOLDER", "the folder or the URL of an index's shards; default: that of the index")
    add("--overwrite", "replace shards and indexes with the same names")
    add("-q/--quiet", "no progress bar")


def _add_label_options(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """Add the options that say where labels come from, of which only one may be given.

    Returns:
        A function that adds another option to this mutually exclusive group.
    """
    group = parser.add_argument_group("where labels come from").add_mutually_exclusive_group()
    add = partial(_add, group, dest="label")
    add("--label FIELD", "a feature or tar member")
    add("--label-json FIELD[:KEY]", "a JSON member, such as json:object.name")
    add("--label-file REGEX", r"the group of a match in a file's name, such as 'class_(\d+)'")
    folder_help = "the first folder of a tar's key, a shard or an image; default for images"
    add("--label-folder", folder_help, action="store_const", const=FromFolder())
    add("--label-folder-level LEVEL", "another folder: 1 is the second, -1 the innermost")
    add("--label-example FEATURE", "an Example that --raw reads whole", type=FromExample)
    return add


def _add_index_parser(commands: Any) -> None:
    """Add the parser of `twinfeed index`."""
    parser = _command_parser(
        commands,
        "index",
        "Index shards, or a folder of images as it is. Nothing is copied or converted.",
        "index 'data/train-*.tfrecord' --out data/train.index --label image/class/label",
        "index 'data/{000000..000099}.tar' --out data/x.index --label cls --field 'image=jpg;png'",
        "index images/ --out images.index",
    )
    add = partial(_add, parser)
    add("shards", "paths, globs, braces, URLs; or a folder of images", nargs="+")
    add("--out FOLDER", "the folder to create, or the index to replace", required=True)
    add_label_option = _add_label_options(parser)
    table_help = (
        "a CSV or TSV file of keys and labels, with the header key,label or of two columns; a key "
        "is that of a tar's sample, of --key, or an image's path without its extension"
    )
    add_label_option("--label-table FILE", table_help, dest="label_table")
    add_classes = partial(_add, parser.add_mutually_exclusive_group())
    add_classes("--classes FILE", "the class names, one per line, in order; or an index")
    add_classes("--label-names", "take text as the name of a class, also if it is an integer")
    add("--background LABEL", "the label of records without a label")
    add("--field NAME[=A;B]...", "keep this field (default: all), under any of these names")
    add("--key FEATURE", "the feature that holds a TFRecord's key")
    add("--list FEATURE...", "read this feature as a list, also if lengths are equal", dest="lists")
    missing_help = (
        "a record without a label, or without a field that --field names, is an error, is excluded "
        "(skip), or has an empty field; any other field may be missing"
    )
    add("--missing", missing_help, shown="error", choices=get_args(Missing))
    add("--exclude FILE", "exclude the bad records that verify --bad-list wrote", default=())
    incomplete_help = "accept numbered shards (-00003-of-00010) of which some are missing"
    add("--incomplete", incomplete_help, dest="complete", action="store_false")
    add("--digest", "store a SHA-256 of each shard, for verify to compare")
    _add_reading_options(add)


def _add_verify_parser(commands: Any) -> None:
    """Add the parser of `twinfeed verify`."""
    parser = _command_parser(
        commands,
        "verify",
        "Check every checksum of an index and its shards, or of shards without an index. A tar "
        "without an index has checksums of its headers alone. Warnings also give the status 1.",
        "verify data/train.index --jobs 4",
        "verify 'data/*.tfrecord' --decode --bad-list bad.jsonl",
        "index 'data/*.tfrecord' --out data/x.index --exclude bad.jsonl",
    )
    add = partial(_add, parser)
    add("target", "an index, or shards", nargs="+")
    add("--decode", "also decode images; needs the extra images")
    add("--bad-list FILE", "write the bad records to this file, for index --exclude")
    _add_reading_options(add)


def _add_raw_option(add: Any) -> None:
    """Add the option --raw by the function `add`."""
    raw_help = "read TFRecords as bytes, for other records than Examples, such as SequenceExamples"
    add("--raw", raw_help, dest="example", action="store_false")


def _add_reading_options(add: Any) -> None:
    """Add the options of `index` and `verify` for how shards are read, by the function `add`."""
    add("--container", "the format; default: by names and first bytes", choices=CONTAINERS)
    add("--join", "join the members of a tar's sample that are not consecutive")
    _add_raw_option(add)
    longest = LIMITS.record_bytes
    add("--max-record-bytes BYTES", "refuse longer records; default 1 GiB", default=longest)
    root_help = "the folder or the URL of all shards; default: that of the index, or for shards at "
    add("--root FOLDER", root_help + "URLs the deepest that has them all")
    add("--jobs N", "the number of parallel processes", shown=1)
    add("-q/--quiet", "no progress bar")


def _index_parser(
    commands: Any, name: str, text: str, *examples: str, sampler_options: str = ""
) -> Callable[..., None]:
    """Add the parser of a command on an index, with the arguments that such commands share.

    Args:
        commands: the subparsers of the main parser.
        name: the name of the command.
        text: the description of the command.
        examples: command lines that the help shows.
        sampler_options: says which options of a sampler the command has. "batches": options for
            random batches, or for batches of P classes with K records each. "shuffles": options for
            a shuffle by blocks, consecutive records of a shard. "": none.

    Returns:
        A function that adds a further argument.
    """
    add = partial(_add, _command_parser(commands, name, text, *examples))
    add("index", "the folder or the URL of the index")
    add("--root FOLDER", "the folder or the URL of the shards; default: that of the index")
    if sampler_options:
        add("--batch-size N", "the number of records of a batch", shown=128)
        add("--seed N", "the seed of the order of records", shown=0)
    if sampler_options == "batches":
        add("--p N", "draw P x K batches: N classes, K records of each; --batch-size is ignored")
        add("--field NAME", "the field with the images; default: the only field with images")
        add("--k N", "records of each class of a P x K batch, default 4; needs --p")
        small_help = "repeat records of classes with fewer than K records, or drop such classes"
        add("--small", small_help, shown="repeat", choices=["repeat", "drop"])
    if sampler_options == "shuffles":
        add("--block N", "consecutive records of a block; default: about 4 MB, less of small data")
        add("--window N", "blocks from which records are drawn; default: up to 128, 512 MB")
    return add


def _add_info_parser(commands: Any) -> None:
    """Add the parser of `twinfeed info`."""
    examples = "info data/train.index", "info data/train.index --json"
    add = _index_parser(commands, "info", "Print what an index contains.", *examples)
    add("--json", "print JSON, for programs")


def _add_cat_parser(commands: Any) -> None:
    """Add the parser of `twinfeed cat`."""
    add = _index_parser(
        commands,
        "cat",
        "Show records, by number or key.",
        "cat data/train.index 0 17",
        "cat data/train.index cat/0001 --field image > 1.png",
    )
    add("records", "record ids (from the end if negative), or keys, such as 000014", nargs="*")
    add("--key KEY...", "show all records with this key, which may look like a number")
    add("--field NAME", "write only the bytes of this field")


def _add_compare_parser(commands: Any) -> None:
    """Add the parser of `twinfeed compare`."""
    add = _index_parser(
        commands,
        "compare",
        "Run the same batches through TensorFlow and PyTorch, and compare the values and speed. "
        "Each framework must be installed.",
        "compare data/train.index --p 8 --k 4 --seed 1 --batches 200",
        sampler_options="batches",
    )
    add("--batches N", "the maximum number of batches", shown=100)
    add("--size N", "decode images, and resize them to N x N pixels; default: not decoded")
    pair, names = ["torch", "tensorflow"], [*BACKENDS]
    add("--backends", "run these; default torch tensorflow", nargs="+", choices=names, default=pair)


def _add_show_parser(commands: Any) -> None:
    """Add the parser of `twinfeed show`."""
    add = _index_parser(
        commands,
        "show",
        "Draw a batch of images: a row for each class of a P x K batch, captions below. Needs "
        "pip install 'twinfeed[images,pictures]'.",
        "show data/train.index --p 8 --k 4 --out batch.png",
        sampler_options="batches",
    )
    add("--step N", "which batch of the epoch", shown=0)
    add("--size N", "fit images into N x N pixels, padded with zeros", shown=128)
    add("--out FILE", "the picture, .png or .svg", shown="batch.png")


def _add_mixing_parser(commands: Any) -> None:
    """Add the parser of `twinfeed mixing`."""
    add = _index_parser(
        commands,
        "mixing",
        "Plot how far records are moved by the shard-aware shuffle, by a uniform shuffle, and by "
        "shuffle buffers. Needs pip install 'twinfeed[pictures]'.",
        "mixing data/train.index --block 64 --window 16 --buffer 1000 --buffer 10000",
        sampler_options="shuffles",
    )
    add("--buffer N...", "a size of shuffle(buffer) to simulate; default a tenth of all records")
    add("--out FILE", "the picture, .png or .svg", shown="mixing.png")


def _add_plan_parser(commands: Any) -> None:
    """Add the parser of `twinfeed plan`."""
    _index_parser(
        commands,
        "plan",
        "Print how many requests and bytes an epoch reads from the shards, with a uniform shuffle "
        "and with the shard-aware shuffle. The shards are not read.",
        "plan data/train.index --root s3://bucket/train --batch-size 512",
        sampler_options="shuffles",
    )


def _add_who_parser(commands: Any) -> None:
    """Add the parser of `twinfeed who`."""
    add = _feed_parser(
        commands,
        "who",
        "Print which records the batch of a step has. The batch is drawn again, not read.",
        "who --feed train.py:feed --step 340",
        "who --feed train.py:feed --step 340 --rank 3 --world-size 8 --state run/state.json",
    )
    add("--step N", "as loader.global_step says in the loop; from 1", required=True)
    add("--rank N", "only the records of this rank; default: of the whole batch")
    add("--world-size N", "the number of ranks, with --rank", shown=1)
    add("--state FILE", "loader.state_dict() as JSON: a feed that does not fit is refused")


def _add_when_parser(commands: Any) -> None:
    """Add the parser of `twinfeed when`."""
    add = _feed_parser(
        commands,
        "when",
        "Print which steps have a record. All batches up to a step are drawn again.",
        "when --feed train.py:feed --record 17 --until 5000",
        "when --feed train.py:feed --record class3/13 --until 5000",
    )
    add("--record RECORD...", "a record id (from the end if negative), or a key")
    add("--key KEY...", "a key, which may look like a number")
    add("--until N", "the last step, as loader.global_step says in the loop", required=True)


def _add_diff_parser(commands: Any) -> None:
    """Add the parser of `twinfeed diff`."""
    _feed_parser(
        commands,
        "diff",
        "Print the first step at which two feeds have other records, and why. No shards are read. "
        "The exit status is 1 if they differ.",
        "diff --feed old/train.py:feed new/train.py:feed",
        feeds=2,
    )


def _feed_parser(
    commands: Any, name: str, text: str, *examples: str, feeds: int | None = None
) -> Callable[..., None]:
    """Add the parser of a command on feeds, and return a function that adds further arguments."""
    add = partial(_add, _command_parser(commands, name, text, *examples))
    add("--feed FILE.py:NAME", "a feed; its file is imported", required=True, nargs=feeds)
    return add


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
    name, _, size = text.partition("=")
    return name, float(size) if "." in size else int(size)


_TYPES: dict[str, Callable[[str], Any]] = {
    "BYTES": checks.bytes_of,
    "FIELD[:KEY]": _parse_json_label,
    "LEVEL": lambda text: FromFolder(int(text)),
    "N": int,
    "REGEX": FromFile,
    "NAME=SIZE": _parse_split,
    "NAME[=A;B]": _parse_field,
}
