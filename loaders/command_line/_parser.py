"""`main` parses the arguments of a command, runs it, and prints its errors.

`_TABLE` is the table of the commands, a paragraph each, from which argparse's parsers are made:

- `NAME: DESCRIPTION`, whose first sentence lists the command; and `$ ` before each example.
- A line for each argument, with its help. "out" is a positional argument, "--raw" a flag.
- "--seed N" has a value. The word determines its type, by `_TYPES`: N is an int. "tar|files" are
  all the values that there are. Without a type in `_TYPES`, values are strings.
- "..." behind an argument: there may be several values. "!" behind its name: it is required.
- A help that ends with "default VALUE" gives the default. `_SPECIAL` has what no text says.
- "(TITLE" and ")" enclose options of which only one may be given. "@NAME" stands for the lines of
  another paragraph. Indented lines continue the line before.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib.metadata import version
from textwrap import fill
from typing import Any, get_args

from twinfeed.loaders.audit.declared import Expectation
from twinfeed.loaders.building.labels import (
    FromExample,
    FromFile,
    FromFolder,
    FromJson,
    FromTable,
)
from twinfeed.loaders.command_line import _commands
from twinfeed.loaders.command_line._printing import error_line, print_lines, show_warning
from twinfeed.loaders.errors import LoaderError, ShardWarning
from twinfeed.loaders.support import checks
from twinfeed.loaders.tools.backends import BACKENDS

_WRITE_AT_END = (_commands.run_pack, _commands.run_index)

_ADVISE_FEWER_JOBS = "lower --jobs if the memory ran out (see dmesg); --jobs 1 shows where it ends"

EPILOG = """\
twinfeed COMMAND --help has examples.

exit status: 0 all is well, 1 data are bad, missing or changed (or verify,
compare, diff, overlap or audit found something), 2 wrong usage, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None, /) -> int:
    """Run a command and return its exit status: 0 success, 1 bad data, 2 wrong usage.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> folder = mkdtemp()
    >>> _ = pack([{"word": b"to"}], folder)
    >>> main(["cat", f"{folder}/data.index", "0"])
    record 0 (data-00000-of-00001.tfrecord, number 0)
      word: 2 bytes, b'to'
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
        text = "; nothing was written" if run in _WRITE_AT_END else ""
        print_lines(f"twinfeed: interrupted{text}", error=True)
        return 130
    except BrokenPipeError:  # the program that reads the output has ended, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BrokenProcessPool as error:
        print_lines(f"twinfeed: error: {error}; what to do: {_ADVISE_FEWER_JOBS}", error=True)
        return 1
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
        """Parse arguments, where options may come between the positional arguments."""
        if self._intermixed:  # before Python 3.13, the call below calls this method again
            return super().parse_known_args(args, namespace)
        self._intermixed = True
        parsed, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with a subparser for each command of the table."""
    parser = argparse.ArgumentParser(
        prog="twinfeed",
        description="Pack records into shards, index and check shards, and look into them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"twinfeed {version('twinfeed')}")
    commands = parser.add_subparsers(metavar="command", required=True, parser_class=_Command)
    paragraphs = _TABLE.lstrip().replace("\n  ", " ")
    for shared, lines in re.findall(r"^(@\w+):\n((?:.+\n?)+)", paragraphs, re.MULTILINE):
        paragraphs = paragraphs.replace(f"\n{shared}\n", f"\n{lines}")
    for head, *lines in [text.split("\n") for text in paragraphs.split("\n\n")]:
        name, _, text = head.partition(": ")
        if head.startswith("@"):
            continue
        examples = [line.replace("$", "  twinfeed", 1) for line in lines if line[0] == "$"]
        command = commands.add_parser(
            name,
            help=text.partition(". ")[0].removesuffix("."),
            description=fill(text, 80),
            epilog="\n".join(["examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for metavar, parse in _TYPES.items():  # argparse then says: invalid 'NAME=SIZE' value
            command.register("type", metavar, parse)
        command.set_defaults(run=getattr(_commands, f"run_{name}"))
        _add_arguments(command, lines[len(examples) :])
    return parser


def _add_arguments(command: argparse.ArgumentParser, lines: list[str]) -> None:
    """Add the arguments of a command, a line for each."""
    group: Any = command
    dest: dict[str, str] = {}
    for line in lines:
        if line == ")":
            group, dest = command, {}
        elif line.startswith("("):
            name, _, title = line[1:].partition(" ")
            group = command.add_argument_group(title) if title else command
            group, dest = group.add_mutually_exclusive_group(), {"dest": name} if name else {}
        else:
            names, options = _argument(line)
            group.add_argument(*names, **dest, **options)


def _argument(line: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names of an argument, and the options of `add_argument`, from its line."""
    usage, text = line.split("  ", 1)
    name, *values = usage.removesuffix("...").split(" ")
    names, several = name.rstrip("!").split("/"), usage.endswith("...")
    options: dict[str, Any] = {"help": text.strip()}
    if values and "|" in values[0]:
        options["choices"] = values[0].split("|")
    elif values:
        options |= {"metavar": values[0], "type": values[0] if values[0] in _TYPES else str}
    elif name.startswith("-"):
        options["action"] = "store_true"
    if len(values) > 1:
        options |= {"nargs": len(values), "metavar": tuple(values)}
    if several and values:
        options |= {"action": "append", "default": [], "help": f"{text.strip()}; may be repeated"}
    elif several:
        options["nargs"] = "+"
    if default := re.search("; default (.+)", text):
        options["default"] = default[1]
    if name.endswith("!"):
        options["required"] = True
    return names, options | _SPECIAL.get(names[0], {})


def _parse_split(text: str) -> tuple[str, int | float]:
    """Parse the value of --split, NAME=SIZE, to the name and the size: an int, or a fraction."""
    name, _, size = text.partition("=")
    return name, float(size) if "." in size else int(size)


def _parse_names(text: str) -> tuple[str, str]:
    """Parse NAME or NAME=OTHER, as of --field, to a pair of names, by default the same."""
    name, _, second_name = text.partition("=")
    return name, second_name or name


_TYPES: dict[str, Callable[[str], Any]] = {
    "BYTES": checks.bytes_of,
    "FIELD[:KEY]": lambda text: FromJson(*text.split(":", 1)),
    "KEY[.KEY]": lambda text: partial(_commands.part_of, text.split(".")),
    "NAME[=OTHER]": _parse_names,
    "LEVEL": lambda text: FromFolder(int(text)),
    "N": int,
    "N,N": lambda text: [int(number) for number in text.split(",")],
    "REGEX": FromFile,
    "NAME=SIZE": _parse_split,
    "NAME[=A;B]": _parse_names,
    "TABLE": FromTable,
}

_SPECIAL: dict[str, dict[str, Any]] = {
    "-q": {"dest": "progress", "action": "store_false"},
    "--backends": {"nargs": "+", "choices": [*BACKENDS], "default": ["torch", "tensorflow"]},
    "--expect": {"choices": get_args(Expectation)},
    "--exclude": {"default": ()},
    "--incomplete": {"dest": "complete", "action": "store_false"},
    "--label-example": {"type": FromExample},
    "--label-folder": {"action": "store_const", "const": FromFolder()},
    "--list": {"dest": "lists"},
    "--raw": {"dest": "example", "action": "store_false"},
    "--record": {"dest": "records"},
    "evaluation": {"nargs": "?"},
    "records": {"nargs": "*", "type": "N"},
}
"""Options of `add_argument` by argument, which the table cannot say."""

_TABLE = r"""
pack: Write a folder of images, the records of an index, or those of compressed shards, to shards,
  and index the shards. Images are not decoded. pack of twinfeed.loaders packs any other samples.
$ pack images/ data/ --split train=0.8 --split eval=0.2 --seed 1
$ pack 'old/*.tar.gz' new/ --container tar
source...                  a folder of images, or of classes; an index; or compressed shards
out                        the folder to write shards and indexes to
--container tar|tfrecord   the shard format; default tfrecord
--split NAME=SIZE...       a split: a number of records, or a fraction; needs --seed
--seed N                   shuffle the records by this seed; default: keep their order
--shards N                 the minimum number of shards of each split; default 1
--shard-bytes BYTES        about the size of a shard; default 200M
--shard-records N          the maximum number of records in a shard
--root FOLDER              the folder or the URL of an index's shards; default: that of the index
-q/--quiet                 no progress bar

index: Index shards, or a folder of images as it is. Nothing is copied or converted.
$ index 'data/train-*.tfrecord' --out data/train.index --label image/class/label
$ index 'data/{000000..000099}.tar' --out data/x.index --label cls --field 'image=jpg;png'
$ index images/ --out images.index
shards...                  paths, globs, braces, URLs; or a folder of images
--out! FOLDER              the folder to create, or the index to replace
(label where labels come from
--label FIELD              a feature or tar member
--label-json FIELD[:KEY]   a JSON member, such as json:object.name
--label-file REGEX         the group of a match in a file's name, such as 'class_(\d+)'
--label-folder             the first folder of the path; a folder of images has its labels by itself
--label-folder-level LEVEL  another folder: 1 is the second, -1 the innermost
--label-example FEATURE    a feature of an Example that --raw reads whole
--label-table TABLE        a CSV or TSV file with the header key,label; see the docs for the keys
)
(
--classes FILE             the class names, one per line, in order; or an index
--label-names              take text as the name of a class, also if it is an integer
)
--background LABEL         the label of records without a label
--field NAME[=A;B]...      keep this field (default: all), under any of these names
--key FEATURE              the feature that holds a TFRecord's key
--list FEATURE...          read this feature as a list, also if lengths are equal
--missing error|skip|empty  a record without a label, or without a field that --field names, is an
  error, is excluded (skip), or has an empty field; any other field may be missing; default error
--exclude FILE             exclude the bad records that verify --bad-list wrote
--incomplete               accept numbered shards (-00003-of-00010) of which some are missing
--digest                   store a SHA-256 of each shard, for verify to compare
@reading

verify: Check every checksum of an index and its shards, or of shards. Warnings give the status 1.
$ verify data/train.index --jobs 4
$ verify 'data/*.tfrecord' --decode --bad-list bad.jsonl
target...                  an index, or shards
--decode                   also decode images; needs the extra images
--bad-list FILE            write the bad records to this file, for index --exclude
@reading

overlap: Find the records of an evaluation whose field has the same bytes as one in training; of one
  index, those that repeat an earlier record. The exit status is 1 if there are any.
$ overlap train.index eval.index --field 'jpg=image/encoded'
$ overlap train.index eval.index --group patient
train                      the index of the training
evaluation                 the index of the evaluation; without one, that of the training
--field NAME[=OTHER]       the field of bytes, if it has several, and its name in the other index
--group COLUMN             compare this column of integers in place of a field; -1 is no group
-q/--quiet                 no progress bar

info: Print what an index contains.
$ info data/train.index
@index

cat: Show records, by number or key.
$ cat data/train.index 0 17
$ cat data/train.index --key cat/0001 --field image > 1.png
@index
records                    the numbers of records
--key KEY...               show all records with this key
--field NAME               write only the bytes of this field

compare: Run a feed through TensorFlow and PyTorch, and compare the values and speed.
$ compare --feed train.py:feed --batches 200
@feed
--batches N                the maximum number of batches; default 100
--backends NAME            run these; default torch tensorflow

show: Draw a batch of images, a row for each class of P x K. Needs twinfeed[images,pictures].
$ show --feed train.py:feed --step 7 --out batch.png
@feed
--step N                   which batch of the epoch; default 0
--out FILE                 the picture, .png or .svg; default batch.png

plan: Print how many requests and bytes an epoch of a feed reads from the shards. Nothing is read.
$ plan --feed train.py:feed
@feed

who: Print which records the batch of a step has. The batch is drawn again, not read.
$ who --feed train.py:feed --step 340 --rank 3 --world-size 8 --state run/state.json
@feed
--step! N                  as loader.global_step says in the loop; from 1
--rank N                   only the records of this rank; default: of the whole batch
--world-size N             the number of ranks, with --rank; default 1
--state FILE               loader.state_dict() as JSON: a feed that does not fit is refused

when: Print which steps have a record. All batches up to a step are drawn again.
$ when --feed train.py:feed --key class3/13 --until 5000
@feed
--record N...              the number of a record
--key KEY...               the key of records
--until! N                 the last step, as loader.global_step says in the loop

diff: Print the first step at which two feeds have other records, and why. The status is then 1.
$ diff --feed old/train.py:feed new/train.py:feed
--feed! A.py:NAME B.py:NAME  two feeds; their files are imported

audit: Examine a sampler of any library: what it draws, and where it contradicts itself. The exit
  status is 1 if it does. The names of the function's parameters say what is asked.
$ audit train.py:make --records 50000 --expect training
$ audit train.py:make --labels labels.npy --world 1,2,4 --expect pk
make                       FILE.py:NAME, a function that builds a sampler; its file is imported
--records N                the number of records; default: that of the labels, or the highest id + 1
--labels FILE.npy          the label of each record, as numpy.save writes an array
--world N,N                the numbers of ranks to try; default 1,2
--epochs N                 how many epochs to compare; default 3
--batch-size N             ids of a batch of one rank, if the sampler gives single ids
--ids KEY[.KEY]            where an item has its ids: 0, or image.id; default: an item is ids
--processes                ranks are processes joined by gloo, for samplers with collectives
--expect NAME              the promise to check, beside contradictions
--seconds N                the seconds for all questions; default 60

@reading:
--container tar|tfrecord|files  the format; default: by names and first bytes
--join                     join the members of a tar's sample that are not consecutive
--raw                      read TFRecords as bytes, for records that are no Examples
--max-record-bytes BYTES   refuse longer records; default 1 GiB
--root FOLDER              the folder or URL of all shards; default: of the index, or of all URLs
--jobs N                   the number of parallel processes; default 1
-q/--quiet                 no progress bar

@index:
index                      the folder or the URL of the index
--root FOLDER              the folder or the URL of the shards; default: that of the index

@feed:
--feed! FILE.py:NAME       a feed; its file is imported
"""
