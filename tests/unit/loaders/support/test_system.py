"""What the operating systems differ in: Linux's own names taken away, and Windows refused."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from twinfeed.loaders.support import system

# A process whose standard library is macOS's, as far as its names go.
WITHOUT_LINUX = """
    import fcntl, mmap, os, resource, select, signal, sys, time
    LINUX = {
        os: "sched_ posix_fa POSIX_FADV_ copy_file_range eventfd memfd_ MFD_ pidfd_ splice "
            "getrandom getxattr setxattr listxattr removexattr fdatasync pipe2 O_DIRECT O_TMPFILE "
            "O_PATH O_NOATIME O_RSYNC O_LARGEFILE",
        fcntl: "F_ADD_SEALS F_GETPIPE_SZ F_SETPIPE_SZ F_NOTIFY",
        mmap: "MAP_POPULATE MAP_LOCKED MAP_HUGE MADV_HUGEPAGE MADV_DONTFORK MADV_REMOVE",
        resource: "prlimit RUSAGE_THREAD RLIMIT_OFILE RLIMIT_RTPRIO",
        select: "epoll EPOLL",
        signal: "SIGPOLL SIGPWR SIGSTKFLT SIGRT sigtimedwait sigwaitinfo",
        time: "CLOCK_BOOTTIME CLOCK_TAI",
    }
    for module, starts in LINUX.items():
        for name in [n for n in vars(module) if n.startswith(tuple(starts.split()))]:
            delattr(module, name)
"""

PLAIN = """
    import importlib, pathlib, re
    sys.modules["torch"] = None  # webdataset would import it
    import twinfeed.loaders as loaders
    from twinfeed.loaders.support.system import processors
    from twinfeed.loaders.reading.prefetch.schedule import Schedule
    from twinfeed.loaders.reading.reader import plan_of_pass
    from twinfeed.samplers import BatchSampler, SequentialSampler
    from twinfeed.loaders.command_line import main

    root = pathlib.Path(loaders.__file__).parent
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not re.search("grain|jax|keras|pictures|torch|tensorflow|__main__", str(parts)):
            importlib.import_module(".".join(["twinfeed.loaders", *parts]))
    words = [{"word": f"{number}".encode()} for number in range(100)]
    for container in ("tfrecord", "tar"):
        index = loaders.pack(words, container, container=container)["data"]
        with loaders.Reader(index) as reader:
            stream = Schedule(BatchSampler(SequentialSampler(100), batch_size=50))
            with plan_of_pass(reader, stream, ["word"], 0, 1000).step(0):
                assert reader.read([99, 0])["word"] == [b"99", b"0"]
        assert main(["verify", f"{container}/data.index", "-q"]) == 0
    assert processors() == os.cpu_count()
"""


def run_without_linux(code: str, folder: Path) -> None:
    program = "\n".join(line.removeprefix("    ") for line in (WITHOUT_LINUX + code).splitlines())
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_loaders_need_no_linux_only_name(tmp_path: Path) -> None:
    run_without_linux(PLAIN, tmp_path)


def test_peak_memory_is_in_bytes_on_every_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    here = system.peak_memory()
    assert here > 8 << 20  # numpy alone takes so much
    monkeypatch.setattr(system.sys, "platform", "darwin")  # whose unit is the byte, not the KiB
    assert 0.75 * here < system.peak_memory() * 1024 < 1 << 40


def test_processors_counts_those_the_process_may_use() -> None:
    code = """
import os
from twinfeed.loaders.support import system
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
print(system.processors())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_import_on_windows_is_refused_in_one_sentence() -> None:
    windows = "import os, sys; sys.modules |= {'fcntl': None, 'resource': None}; del os.pread; "
    done = subprocess.run(
        [sys.executable, "-c", windows + "import twinfeed.loaders"],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"ImportError: twinfeed\.loaders does not support Windows: use .*", said)
    subprocess.run([sys.executable, "-c", windows + "import twinfeed.samplers"], check=True)


def test_no_module_sets_tensorflow_devices() -> None:
    """TensorFlow takes a GPU's memory when it first sees the GPU: that is the user's choice."""
    package = Path(system.__file__).parent
    setting = re.compile(r"set_visible_devices|set_memory_growth|CUDA_VISIBLE_DEVICES|TF_FORCE_GPU")
    assert not [path for path in package.rglob("*.py") if setting.search(path.read_text())]


def test_checksum_in_pure_python_warns() -> None:
    """If google-crc32c lacks its C extension: at the first import that needs a checksum."""
    without = "import sys; sys.modules['google_crc32c._crc32c'] = None; "
    for module in ("twinfeed.loaders.index", "twinfeed.loaders.command_line"):
        done = subprocess.run(
            [sys.executable, "-c", f"{without}import {module}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert re.search(r"RuntimeWarning: .*google-crc32c.*slower", done.stderr)


ASKING = re.compile(
    r"sched_getaffinity|cpu_count|ru_maxrss|getrlimit|/dev/(fd|shm)|/proc/|posix_fa|sys\.platform"
)


def test_only_system_module_asks_the_platform() -> None:
    package = Path(system.__file__).parent
    asking = {path.name for path in package.rglob("*.py") if ASKING.search(path.read_text())}
    assert asking == {"system.py"}


@pytest.mark.skipif(sys.platform != "linux", reason="another getrusage")
def test_peak_memory_of_a_child_is_not_the_parents() -> None:
    ballast = np.ones(1 << 28, np.uint8)
    code = "from twinfeed.loaders.support import system; print(system.peak_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < ballast.nbytes
