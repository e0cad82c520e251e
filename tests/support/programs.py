"""Start scripts as a user does, alone or by torchrun, each in processes of its own."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from support import ROOT

EXAMPLES = ROOT / "examples"
ADDRESS = "127.0.0.1"
# A machine whose own name cannot be looked up has no address for gloo but the loopback's.
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
# An interpreter in which the frameworks of a program are imported already (start/forks.py). Another
# process runs them: a program that is killed from outside prints its process id.
PYTHON = os.environ.get("TESTS_PYTHON", sys.executable)
# For processes that share two cores with others, and say no more than the programs themselves.
QUIET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
QUIET |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "PYTHON_EXEC": PYTHON}  # of torchrun and its ranks


def run(script: Path, *options: str, ranks: int | None = None) -> str:
    """What a script prints; `ranks` processes are started by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--local-addr", ADDRESS, "--master-addr", ADDRESS, "--master-port", free_port()]
    # For the data of the stories.
    paths = os.pathsep.join([str(EXAMPLES), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [PYTHON, *(launcher if ranks else []), str(script), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | QUIET | {"MASTER_PORT": free_port(), "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.create_server((ADDRESS, 0)) as server:
        return str(server.getsockname()[1])


def run_code(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, with a limit on its time."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )
