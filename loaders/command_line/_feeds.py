"""Make the sampler and the feed of a command."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

from twinfeed.loaders.batches.feed import Feed, check_feed
from twinfeed.loaders.feed.decode import DecodeImage, Fit
from twinfeed.loaders.index import Index
from twinfeed.loaders.loop.run import Run
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file
from twinfeed.samplers import BatchSampler, BatchStream, PKBatchSampler, RandomSampler


def load_feed(text: str) -> Feed:
    """Import a Python file, and return its feed: "train.py:feed" is `feed` of train.py."""
    return check_feed(load_name(text, "--feed"))


def load_name(text: str, argument: str) -> Any:
    """Import a Python file, and return what has a name in it: "train.py:feed", `feed` of train.py.

    While the file is imported, `sys.argv` has its path alone, and no loader starts. Its modules are
    forgotten, as another file may have others of the same names.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"{argument} must be FILE.py:NAME, such as train.py:feed, got {text!r}")
    file = Path(path).resolve(strict=True)
    sys.path.insert(0, str(file.parent))
    arguments, modules = sys.argv, {*sys.modules}
    sys.argv, Run.refused = [path], 0
    try:
        names = run_path(str(file), run_name=file.stem)
    except BaseException as error:
        if not Run.refused and not isinstance(error, SystemExit):
            raise
        status = f"exits (status {getattr(error, 'code', None)})"
        raise ValueError(
            f"{path} {'starts a loader' if Run.refused else status} while it is imported: put "
            "what trains, runs and parses arguments below if __name__ == '__main__'"
        ) from None
    finally:
        sys.argv, Run.refused = arguments, None
        for module in sys.modules.keys() - modules:
            if _is_beside(module, file.parent):
                del sys.modules[module]
    if name not in names:
        raise ValueError(f"{path} has no {name!r}: give {argument} a name of its top level")
    return names[name]


def _is_beside(module: str, folder: Path) -> bool:
    """Return whether a module, or the package that it is in, lies in a folder."""
    # Not by `getattr`, which would import what is lazy.
    file = Path(getattr(sys.modules[module], "__dict__", {}).get("__file__") or "/")
    top = module.partition(".")[0]
    return file.is_relative_to(folder) and file.relative_to(folder).parts[0] in (top, f"{top}.py")


def load_state(path: str) -> Any:
    """Return the state in a JSON file, whatever it holds."""
    try:
        return json.loads(read_file(path, LIMITS.manifest_bytes))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no JSON ({error}): write a state by json.dump(loader.state_dict(), file)"
        ) from None


def sampler_of(options: argparse.Namespace, index: Index) -> BatchStream:
    """Return the sampler of a command: random batches, or with `--p` P x K batches."""
    if options.p is None:
        if options.k is not None:
            raise ValueError("--k is for P x K batches: give --p too, or no --k")
        sampler = RandomSampler(len(index), seed=options.seed)
        return BatchSampler(sampler, batch_size=options.batch_size)
    labels, p, k = index.labels, options.p, 4 if options.k is None else options.k
    return PKBatchSampler(labels, p=p, k=k, small=options.small, seed=options.seed)


def feed_of(
    options: argparse.Namespace,
    index: Index,
    sampler: BatchStream,
    image: str | None,
    *,
    fit: Fit = "stretch",
) -> Feed:
    """Return a feed of all fields of an index, lists ragged and missing values empty."""
    decode = None
    if image is not None:
        if image not in index.fields:
            fields = ", ".join(index.fields)
            raise ValueError(f"no field {image!r}: name that of the images with --field: {fields}")
        decode = DecodeImage(image, size=(options.size, options.size), fit=fit)
    stored = {name: field for name, field in index.fields.items() if name not in index.columns}
    lists = {name for name, field in stored.items() if field.kind != "bytes"}
    incomplete = {name for name, field in stored.items() if field.missing} - {image}
    return Feed(
        index,
        sampler,
        decode=decode,
        collate=dict.fromkeys(lists, "ragged"),
        missing={name: [] if name in lists else b"" for name in incomplete},
    )
