"""The errors of the loaders: what is wrong, where exactly, and what to do about it.

Each class also is the builtin that fits (`ValueError`, `EOFError`, `RuntimeError`), so that code
written before this library catches it too. A file that is not there stays `FileNotFoundError`.
`StateMismatchError` is in the samplers.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

REBUILD = (
    "build the index again with the same options as before (`twinfeed info` prints them): "
    "twinfeed index"
)
"""Advice for an index that no longer fits."""

ADVISE_IMPORTABLE = (
    "define the functions that you pass in a module that can be imported (not in a notebook, nor "
    "as a lambda), and guard the start of a script with if __name__ == '__main__'"
)
"""Advice where a spawned process died while it imported the main script."""


class LoaderError(Exception):
    """Say what went wrong, with the location in the data and one line of advice.

    Each argument is an attribute too. None means "not known" or "does not apply".

    Args:
        problem: what went wrong.
        path: of the shard, the index or the file.
        offset: in bytes, where in the shard the record begins, or the part of it that has the
            problem.
        record: its number in the shard.
        key: of the record.
        expected: the value that is right.
        found: the value that was found instead.
        advice: what to do.

    `usual` is the advice of the class, for errors without advice of their own.

    >>> print(LoaderError("no such field", path="a.tar", record=3, advice="name one of: jpg, cls"))
    no such field
      path: a.tar
      record: 3
      what to do: name one of: jpg, cls
    """

    usual: str | None = None

    def __init__(
        self,
        problem: str,
        /,
        *,
        path: object = None,
        offset: int | None = None,
        record: int | None = None,
        key: str | None = None,
        expected: object = None,
        found: object = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = None if path is None else str(path)
        self.offset, self.record, self.key = offset, record, key
        self.expected, self.found = expected, found
        self.advice = self.usual if advice is None else advice

    def __str__(self) -> str:
        """Return the problem and, a line each, the locations and values that are known."""
        details = {
            "path": self.path,
            "byte offset": self.offset,
            "record": self.record,
            "key": self.key,
            "expected": self.expected,
            "found": self.found,
            "what to do": self.advice,
        }
        known = [f"  {name}: {value}" for name, value in details.items() if value is not None]
        lines = "\n".join([self.problem, *known]).split("\n")
        # Names and values come from files, and may have escape sequences that a terminal obeys.
        return "\n".join(map(printable, lines))


class DataCorruptionError(LoaderError, ValueError):
    """Report bytes that break their format or do not match their checksum."""

    usual = (
        "restore the shard, or leave out what is bad: twinfeed verify SHARDS --bad-list FILE, then "
        "twinfeed index --exclude FILE (in Python exclude=)"
    )


class TruncatedShardError(DataCorruptionError, EOFError):
    """Report a shard that ends within a record."""

    usual = f"its writer may not have been closed: {DataCorruptionError.usual}"


class StaleIndexError(LoaderError, ValueError):
    """Report an index whose shard has changed since it was built."""

    usual = f"restore what has changed, or {REBUILD}"


class IndexFormatError(LoaderError, ValueError):
    """Report an index that is incomplete, damaged, or has a version this library does not read."""

    usual = REBUILD


class WorkerDiedError(LoaderError, RuntimeError):
    """Report a worker process that ended, or could not share its batch."""


class UnsafeContentError(LoaderError):
    """Report content that would execute code, or a path that leads out of its folder."""


class DecodeError(LoaderError, ValueError):
    """Report a record on which the caller's `decode`, `transform` or label function failed, or
    whose fields do not fit into a batch with those of other records.
    """


class ShardWarning(UserWarning):
    """Warn of a shard that can be read whole, but was not written as it should be."""

    def __str__(self) -> str:
        """Return the text without what a terminal would obey."""
        return printable(super().__str__())


def check_bytes(what: str, size: int, max_size: int, /, *, path: object, advice: str) -> None:
    """Raise LoaderError if a file, an index or a batch, as `what` says, has too many bytes.

    `path` and `advice` are those of the error.
    """
    if size > max_size:
        problem = f"{what} has too many bytes"
        expected, found = f"at most {max_size} bytes", f"{size} bytes"
        raise LoaderError(problem, path=path, expected=expected, found=found, advice=advice)


def printable(text: str, /) -> str:
    """Escape the characters of a string that are not printable: a terminal could obey them."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


@contextmanager
def pickled() -> Iterator[None]:
    """Turn a pickle error in the `with` block into a LoaderError that says what to do."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "pickle" not in str(error) and "local object" not in str(error):
            raise
        raise LoaderError(
            f"the feed cannot be pickled for another process: {error}",
            advice="let a source keep the path of a file or database, and open it where it is read "
            f"(docs/own-records.md); {ADVISE_IMPORTABLE}",
        ) from error


def sendable(error: Exception, /) -> Exception:
    """Return an exception that can be pickled for another process, without its traceback.

    An exception that cannot be pickled becomes a LoaderError with its text.
    """
    # With tblib, which TensorFlow imports, errors would be pickled with their frames.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return LoaderError(f"{type(error).__name__}: {error}")
    return error
