"""Record the streams of all cases: run after a deliberate change, with a changelog line.

PYTHONPATH=tests python tests/golden/record.py
"""

from __future__ import annotations

import json
from pathlib import Path

from support.sampler_cases import CASES, digest


def main() -> None:
    """Write the first batches and a digest of every case."""
    golden = {}
    for name, factory in CASES:
        sampler = factory()
        first = sampler.batches(0, 0, min(3, len(sampler)))
        golden[name] = {"first": [ids.tolist() for ids in first], "digest": digest(sampler)}
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in golden.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (Path(__file__).parent / "samplers.json").write_text(text)


if __name__ == "__main__":
    main()
