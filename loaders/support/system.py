"""Facts of the operating system: the only module in which Linux and macOS differ.

Windows is not supported, and importing this module says so. The names below are looked up when they
are needed, since macOS lacks some of them.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import Literal

try:
    import resource
except ImportError as error:
    raise ImportError(
        "twinfeed.loaders does not support Windows: use Linux, macOS or the Windows Subsystem for "
        "Linux (twinfeed.samplers works everywhere)"
    ) from error

SHARED_MEMORY = Path("/dev/shm")

# Where control groups of version 2 and 1 say what their memory may be.
_GROUPS = {
    "": (Path("/sys/fs/cgroup"), "memory.max"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}

_READ_AT_ONCE = 1 << 17

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # see mallopt(3)


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_memory() -> int:
    """Return the largest resident size that this process has had, in bytes.

    On Linux the figure of `getrusage` has a parent's memory in it, as of before this program began.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    status = Path("/proc/self/status")
    found = re.search(
        r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8") if status.exists() else ""
    )
    return 1024 * (int(found[1]) if found else peak)


def memory() -> int:
    """Return how many bytes of memory this process may use: the machine's, or a control group's."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds in _GROUPS:
            root, name = _GROUPS[kinds]
            # In a container the path may be the host's, and the root the container's own group.
            for place in (root / path.lstrip("/") / name).parents:
                with suppress(OSError, ValueError):  # there is none, or it says "max"
                    least = min(least, int((place / name).read_text(encoding="utf-8")))
    return least


def describe_exit(code: int, /) -> str:
    """Say how a process ended: by itself, or by a signal.

    >>> describe_exit(1), describe_exit(-9)
    ('ended with exit code 1', 'was killed by SIGKILL')
    """
    return f"was killed by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def cold(fd: int, offset: int, /) -> bool | None:
    """Whether reading a byte would wait for the disk; None if the system cannot say."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def file_limit() -> int | None:
    """Return how many files this process may hold open, or None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def open_files() -> int:
    """Return how many files this process has open, the listing's own among them."""
    return len(os.listdir("/dev/fd"))


def advise(fd: int, offset: int, length: int, advice: Literal["WILLNEED", "DONTNEED"], /) -> None:
    """Advise the kernel of the next use of some pages of a file, if the system can."""
    if not hasattr(os, "posix_fadvise"):
        return
    flag = getattr(os, f"POSIX_FADV_{advice}")
    # With one call, Linux reads no more pages than it reads ahead for this disk.
    piece = _READ_AT_ONCE if advice == "WILLNEED" else max(1, length)
    for start in range(offset, offset + max(1, length), piece):
        os.posix_fadvise(fd, start, min(piece, offset + length - start), flag)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next batch, up to its own dynamic limits.

    glibc begins with 128 KiB, and TensorFlow goes back to that whenever it makes a dataset of a
    generator. Each batch would then fault its pages in anew, which takes longer than to read them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 25)
        mallopt(_TRIM_THRESHOLD, 1 << 26)


def give_back_memory() -> None:
    """Have glibc return freed memory, which it keeps for the threads that freed it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def shared_memory() -> str:
    """Describe the room in the folder through which processes share memory."""
    if not SHARED_MEMORY.exists():
        return "not there"
    usage = shutil.disk_usage(SHARED_MEMORY)
    return f"{usage.total >> 20} MiB, {usage.free >> 20} MiB of them free"
