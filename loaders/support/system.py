"""The operating system: the only module in which Linux and macOS differ.

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
from functools import cache
from pathlib import Path
from signal import Signals

try:
    import resource
except ImportError as error:
    raise ImportError(
        "twinfeed.loaders does not support Windows: use Linux, macOS or the Windows Subsystem for "
        "Linux (twinfeed.samplers works everywhere)"
    ) from error

SHARED_MEMORY = Path("/dev/shm")

# The file with the memory limit of a control group, of version 2 and 1.
_CGROUP_LIMITS = {
    "": (Path("/sys/fs/cgroup"), "memory.max"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}

_MAX_READAHEAD = 1 << 17  # bytes that one call makes Linux read, for most disks

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of parameters of mallopt(3)


def processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_memory() -> int:
    """Return the largest resident size that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    status = Path("/proc/self/status")
    text = status.read_text(encoding="utf-8") if status.exists() else ""
    match = re.search(r"VmHWM:\s+(\d+) kB", text)
    return 1024 * (int(match[1]) if match else peak)


@cache  # each epoch asks for it, and to read the files takes as long as to read a batch
def memory() -> int:
    """Return how many bytes of memory this process may use, as of the first call."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds in _CGROUP_LIMITS:
            root, name = _CGROUP_LIMITS[kinds]
            # In a container the path may be the host's, and the root the container's own group.
            for folder in (root / path.lstrip("/") / name).parents:
                with suppress(OSError, ValueError):  # there is no file, or it has "max"
                    limit = min(limit, int((folder / name).read_text(encoding="utf-8")))
    return limit


def describe_exit(code: int, /) -> str:
    """Return how a process ended, as text: with an exit code, or by a signal.

    >>> describe_exit(1), describe_exit(-9)
    ('ended with exit code 1', 'was killed by SIGKILL')
    """
    return f"was killed by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def is_uncached(fd: int, offset: int, /) -> bool | None:
    """Return whether a byte of a file is missing in the page cache; None if this is not known."""
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
    """Return the number of files that this process may have open; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def open_files() -> int:
    """Return the number of files that this process has open, and one for the listing."""
    return len(os.listdir("/dev/fd"))


def advise(fd: int, offset: int, length: int, /) -> None:
    """Tell the kernel that a range of a file will be read soon, so that it reads it ahead."""
    if not hasattr(os, "posix_fadvise"):
        return
    # In one call, Linux reads no more pages than the read-ahead of the disk.
    for start in range(offset, offset + max(1, length), _MAX_READAHEAD):
        nbytes = min(_MAX_READAHEAD, offset + length - start)
        os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_WILLNEED)


def keep_freed_memory() -> None:
    """Let malloc of glibc keep freed memory for the next batch, up to its own dynamic limits."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # 32 and 64 MiB, the largest values that malloc's own dynamic adjustment reaches.
        mallopt(_MMAP_THRESHOLD, 1 << 25)
        mallopt(_TRIM_THRESHOLD, 1 << 26)


def release_freed_memory() -> None:
    """Let malloc of glibc return the freed memory that it keeps to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def shared_memory() -> str:
    """Return as text how large /dev/shm is, through which processes share memory, and how full."""
    if not SHARED_MEMORY.exists():
        return "not there"
    usage = shutil.disk_usage(SHARED_MEMORY)
    return f"{usage.total >> 20} MiB, {usage.free >> 20} MiB of them free"
