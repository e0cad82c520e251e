"""What tests share: data, definitions, servers and the start of programs."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
PROGRAMS = TESTS / "programs"
