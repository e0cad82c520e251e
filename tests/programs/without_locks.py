"""Take the locks of files away from a process, as a file system without `flock` does."""

from __future__ import annotations

import ctypes
import platform
import struct

_FLOCK = {"x86_64": 73, "aarch64": 32}
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def take_locks_away(error: int) -> None:
    """From now on, the kernel answers each `flock` of this process with an error.

    A filter of system calls cannot be taken back: call this in a process of its own.
    """
    steps = (
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 0, 1, _FLOCK[platform.machine()]),
        (_RETURN, 0, 0, _ERROR | error),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    system = ctypes.CDLL(None, use_errno=True)
    for step in (
        (_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (_SECCOMP, _FILTER, ctypes.byref(_Program(len(steps), code)), 0, 0),
    ):
        if system.prctl(*step):
            raise OSError(ctypes.get_errno(), "prctl")
