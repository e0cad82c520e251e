"""The base of what `diagnose`, `audit`, `compare`, `diff`, `overlap` and `verify` return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING


class Verdict:
    """The result of an examination. Printed, it says all that was found.

    Attributes:
        findings: what is wrong.

    >>> from twinfeed.samplers import Verdict, diagnose
    >>> isinstance(diagnose(range(100), batch_size=10), Verdict)
    True
    """

    if TYPE_CHECKING:

        @property
        def findings(self) -> Sequence[object]: ...

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong: there are no findings."""
        return not self.findings
