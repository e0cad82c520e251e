"""The ledger of a run: which steps a loop has received, as lines of JSON.

A range is a run of consecutive steps. It has a "begin" line before its first batch, and an "end"
line at its last: it is open in between. Beside the ledger lies a file of 16 bytes, the position
file: the offset of the "begin" line of the open range, and the step after the last delivered batch.
This file is overwritten after each batch and never synced, so after a power loss it may be older
than the run.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import warnings
from datetime import UTC, datetime
from pathlib import Path
from struct import Struct
from typing import Any, NoReturn
from weakref import WeakSet

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.index.paths import output_path
from twinfeed.loaders.loop.record_state import record_state
from twinfeed.loaders.support.atomic import flock
from twinfeed.loaders.support.closing import Closing
from twinfeed.loaders.support.regular import open_regular
from twinfeed.samplers import BatchStream, validate
from twinfeed.samplers.validate import a_type

LEDGER_VERSION = 1
POSITION = Struct("<qq")
LINE_START = b'{"ledger": %d,' % LEDGER_VERSION  # every line of a ledger starts so

_NO_OPEN_RANGE = POSITION.pack(-1, 0)  # the position file while each range has an "end" line

_LEDGERS: WeakSet[Ledger] = WeakSet()  # ledgers to close at exit, and to leave alone after a fork


def _after_fork() -> None:
    """Let the ledgers of the parent write nothing in a forked child."""
    for ledger in list(_LEDGERS):
        ledger._detach()


def _at_exit() -> None:
    for ledger in list(_LEDGERS):
        ledger.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


def path_of_rank(path: str | os.PathLike[str], rank: int, /) -> Path:
    """Return the path of a rank's ledger: rank 0 has the path itself.

    >>> path_of_rank("/run/ledger.jsonl", 3).name
    'ledger.rank3.jsonl'
    """
    path = output_path(path)
    rank = validate.integer("rank", rank, minimum=0)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def position_path(path: Path, /) -> Path:
    """Return the path of the position file of a ledger: it says how far the open range has come."""
    return path.with_name(f"{path.name}.position")


def sampler_of(feed_or_sampler: Feed | BatchStream, /) -> BatchStream:
    """Return the batch sampler of a feed, or the argument itself if it is a batch sampler.

    `BatchStream` is the base class of batch samplers.

    Raises:
        TypeError: the argument is neither of them.
    """
    sampler = feed_or_sampler.sampler if isinstance(feed_or_sampler, Feed) else feed_or_sampler
    if not isinstance(sampler, BatchStream):
        raise TypeError(f"expected a Feed or a batch sampler, got {a_type(sampler)}")
    return sampler


class Ledger(Closing):
    """Write which steps a loop has received, so that `who` can say which records made a step.

    Every loader takes `ledger="run/ledger.jsonl"` and does all this by itself. Where another host
    iterates, as over an `IdSequence`, call `delivered` for each step, and `close` at the end.

    A line is written where a range of steps begins or ends: with the first batch, after a jump,
    when a state is loaded, at `close` and at the exit of the process. It is on the disk before the
    batch is delivered. No line is written for a batch. A ledger that exists is continued. Each rank
    writes a file of its own: rank 3 of `ledger.jsonl` writes `ledger.rank3.jsonl`.

    Copies, pickles and forked children write nothing. If a line cannot be written, as on a full
    disk, the ledger warns and ends there, and the training goes on.

    Args:
        path: the file. Its folder is made.
        stream: the feed that the batches are of, or the sampler.

    Raises:
        ValueError: a URL.
        LoaderError: the file is not a ledger; or, with the first batch, another loader writes it.
        TypeError: `stream` is neither a feed nor a sampler.

    >>> from tempfile import mkdtemp
    >>> from twinfeed import BatchSampler, RandomSampler
    >>> sampler = BatchSampler(RandomSampler(8, seed=0), batch_size=4)
    >>> with Ledger(f"{mkdtemp()}/ledger.jsonl", sampler) as ledger:
    ...     for global_step in range(6):
    ...         ledger.delivered(global_step)
    """

    _ledger_fd = _position_fd = -1  # descriptors; -1 while the files are closed
    _enabled = False  # False after an error, and in a forked child
    _next_step: int | None = None  # the step after the last delivered batch; None: no open range

    def __init__(self, path: str | os.PathLike[str], stream: Feed | BatchStream, /) -> None:
        sampler = sampler_of(stream)
        self.path = path_of_rank(path, sampler.rank)
        self._stream, self._sampler = stream, sampler
        self._run_was_written = False  # whether a line since the opening describes the run
        self._range_offset = 0  # where in the file the "begin" line of the open range starts
        self._enabled = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open_files()  # raises LoaderError now if the file is not a ledger
        self.close()
        _LEDGERS.add(self)

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r}, {self._stream!r})"

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None: two objects cannot write to one file."""
        return type(None), ()

    def __del__(self) -> None:
        self.close()

    def delivered(self, global_step: int, steps: int = 1, /) -> None:
        """Write that a loop receives a batch, or the batches of several consecutive steps.

        A jump, to a step that does not follow the last one, starts a new range of steps.

        Args:
            global_step: the first of the steps, counted over all epochs.
            steps: the number of steps.
        """
        if not self._enabled:
            return
        steps = validate.integer("steps", steps, minimum=0)
        try:
            if self._next_step is None or global_step != self._next_step:
                self._start_range(validate.integer("global_step", global_step, minimum=0))
            self._next_step = int(global_step) + steps
            # No line is written for a batch. The position file, 16 bytes that are overwritten, says
            # where the line of the current range of steps is, and which step comes next.
            os.pwrite(self._position_fd, POSITION.pack(self._range_offset, self._next_step), 0)
        except OSError as error:
            self._disable(error)

    def loaded(self, global_step: int, /) -> None:
        """Write to the ledger that a saved state was loaded, so that the loop goes on at this step.

        The ledger has a line at the start and at the end of each range of consecutive steps that a
        loop has received. The loop may now jump to another step, so the current range ends here.
        `global_step` is counted over all epochs.
        """
        if not self._enabled:
            return
        global_step = validate.integer("global_step", global_step, minimum=0)
        try:
            self._end_range()  # the next batch starts another range
            self._write_line("load", global_step)
        except OSError as error:
            self._disable(error)

    def changed(self, stream: Feed | BatchStream, global_step: int, /) -> None:
        """Note that batches come from another feed or sampler from this step on.

        Its batches before this step are the same. A "change" line has the fields of the sampler's
        fingerprint that differ; None means that the new fingerprint lacks the field.
        """
        global_step = validate.integer("global_step", global_step, minimum=0)
        old = self._sampler.fingerprint
        self._stream, self._sampler = stream, sampler_of(stream)
        if not (self._enabled and self._run_was_written):
            return  # the next "begin" line will describe the new sampler
        new = self._sampler.fingerprint
        fields = {name: new.get(name) for name in old | new if old.get(name) != new.get(name)}
        try:
            self._write_line("change", global_step, fields=fields)
        except OSError as error:
            self._disable(error)

    def close(self) -> None:
        """End the range of steps, and close the files; a later batch opens them again."""
        try:
            self._end_range()
        except OSError as error:
            self._disable(error)
        self._close_files()

    def _start_range(self, step: int) -> None:
        """Write the "begin" line of a range, consecutive steps from `step` on.

        The first such line after the file was opened also describes the run: its sampler, index and
        rank.
        """
        self._end_range()
        run = {} if self._run_was_written else self._run_description(step)
        self._range_offset = self._write_line("begin", step, **run)
        self._run_was_written = True

    def _end_range(self) -> None:
        """Write the "end" line of the open range of consecutive steps, if a range is open.

        While a range is open, the position file says which step comes next. If the process is
        killed, the "end" line is written from it when the ledger is opened again. The range that is
        closed here has its line, so the position file must say that no range is open.
        """
        if self._next_step is not None:
            # A range is open. Its end is the step after the last delivered batch.
            end_step, self._next_step = self._next_step, None
            self._write_line("end", end_step)
            self._reset_position_file()

    def _run_description(self, step: int) -> dict[str, Any]:
        """Return all that decides which records the batches have, for a line of the ledger.

        That is the version of this library, the rank and the number of ranks, the fingerprint of
        the index, and the state that a loader would save before step `step`, counted over all
        epochs.
        """
        # Imported here, as this import would take a sixth of the time of `import twinfeed`.
        from importlib.metadata import version

        sampler, source = self._sampler, getattr(self._stream, "index", None)
        state = sampler.state_at(*divmod(step, len(sampler)))
        # An option of a sampler may be a schedule, such as {0: 8, 340: 16} for 16 from step 340 on.
        # A saved state has only the part before its own step, and the ledger needs all of it.
        state["fingerprint"] = sampler.fingerprint
        if source is not None:
            state["records"] = record_state(source)
        return {
            "twinfeed": version("twinfeed"),
            "rank": sampler.rank,
            "world_size": sampler.world_size,
            "index": getattr(source, "fingerprint", None),
            "state": state,
        }

    def _write_line(self, event: str, step: int, **fields: Any) -> int:
        """Append a line to the file and sync it; return the offset at which the line begins."""
        if self._ledger_fd < 0:
            self._open_files()
            self._lock_and_repair()
        time = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"ledger": LEDGER_VERSION, "event": event, "time": time, "step": step, **fields}
        offset = os.lseek(self._ledger_fd, 0, os.SEEK_END)
        data = json.dumps(line).encode() + b"\n"
        if os.write(self._ledger_fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._ledger_fd)
        return offset

    def _open_files(self) -> None:
        """Open the ledger and the position file beside it, and check what kind of files they are.

        The ledger has lines of JSON: "begin" and "end" lines of ranges of consecutive steps that
        the loop has received. The position file says where the "begin" line of the last range is,
        and which step came last, as long as the range has no "end" line.

        Raises:
            LoaderError: one of them is some other file, which is not changed.
        """
        problem = f"not a file of a ledger of version {LEDGER_VERSION}"
        advice = "give ledger= the name of a file that does not exist"
        self._ledger_fd = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        # The first bytes are `LINE_START`, or only a part of it: a new file is empty, and a killed
        # process may have written a part of the line.
        if not LINE_START.startswith(os.pread(self._ledger_fd, len(LINE_START), 0)):
            self._raise_error(problem, self.path, advice)
        position = position_path(self.path)
        self._position_fd = open_regular(position, os.O_RDWR | os.O_CREAT)
        if os.fstat(self._position_fd).st_size not in (0, POSITION.size):
            self._raise_error(problem, position, advice)

    def _raise_error(self, problem: str, path: Path, advice: str) -> NoReturn:
        """Close the files, and raise LoaderError without the error that led here."""
        self._close_files()
        raise LoaderError(problem, path=path, advice=advice) from None

    def _lock_and_repair(self) -> None:
        """Lock the ledger for this object, and repair what a killed process left behind.

        That may be an incomplete last line, and a range of steps without its "end" line. The
        position file says which range was open, and the step after its last batch.
        """
        try:
            flock(self._ledger_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "close that loader, or give each loader a ledger of its own"
            self._raise_error("another loader writes this ledger", self.path, advice)
        data = os.pread(self._ledger_fd, os.fstat(self._ledger_fd).st_size, 0)
        complete_size = data.rfind(b"\n") + 1  # up to the last complete line
        os.ftruncate(self._ledger_fd, complete_size)
        position = os.pread(self._position_fd, POSITION.size, 0) or _NO_OPEN_RANGE
        range_offset, next_step = POSITION.unpack(position)
        # Whether a range was open, and its "begin" line is there. The file may be damaged, too.
        if 0 <= range_offset < complete_size and 0 <= next_step < validate.LIMIT:
            self._write_line("end", next_step, killed=True)
        self._reset_position_file()

    def _reset_position_file(self) -> None:
        """Write to the position file that all ranges of steps in the ledger have an "end" line.

        The file is synced, since this must be on the disk before the next range begins.
        """
        os.pwrite(self._position_fd, _NO_OPEN_RANGE, 0)
        os.fsync(self._position_fd)

    def _close_files(self) -> None:
        """Close the ledger and its position file, which also unlocks the ledger."""
        for descriptor in (self._ledger_fd, self._position_fd):
            if descriptor >= 0:  # -1 means that it is closed
                os.close(descriptor)
        self._ledger_fd = self._position_fd = -1
        # Another run may write to the ledger before it is opened again. So the next "begin" line
        # must describe this run again: its sampler, index and rank.
        self._run_was_written = False

    def _detach(self) -> None:
        """Write nothing any more, and close the files, which in a child has the parent's lock."""
        self._enabled, self._next_step = False, None
        self._close_files()

    def _disable(self, error: OSError) -> None:
        """Warn that a line could not be written, and write nothing any more."""
        self._detach()
        warnings.warn(
            f"{self.path}: the ledger ends here, as it cannot be written: {error.strerror}",
            stacklevel=3,
        )
