"""Two processes started by torchrun give one process's metrics."""

import os
import socket
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp_evaluation.py"


def run(command: list[str], folder: Path) -> str:
    # A machine whose own name cannot be looked up has no address for gloo but the loopback's.
    loopback = "lo" if sys.platform == "linux" else "lo0"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    done = subprocess.run(
        [sys.executable, *command, str(EXAMPLE), "--data", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment | {"MASTER_PORT": str(free_port())},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_two_ranks_evaluate_like_one(tmp_path: Path) -> None:
    one = run([], tmp_path)
    assert one.startswith("1 processes: 761 records, each once; loss ")
    port, address = str(free_port()), "127.0.0.1"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", address]
    two = run([*launcher, "--master-addr", address, "--master-port", port], tmp_path)
    assert two.partition(": ")[2] == one.partition(": ")[2]
