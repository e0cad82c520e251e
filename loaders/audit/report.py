"""The answers of an audit, and how they are printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from twinfeed.samplers.verdict import Verdict

Mark = Literal["!", "-", " "]


class Answer(NamedTuple):
    """An answer to a question.

    >>> Answer("len", "103, and 102 came", "!").mark
    '!'
    """

    #: The question, such as "len" or "resume".
    question: str
    #: The answer, a phrase.
    text: str
    #: "!" is a fault, "-" a fact about which nothing was promised, and " " holds.
    mark: Mark


@dataclass(frozen=True)
class Audit(Verdict):
    """The answers of an audit. Printed, it has a line for each, and for what was not asked.

    Attributes:
        name: the name of the function `make`.
        expect: what was declared.
        answers: all answers, in the order of the questions.
        not_asked: the questions that were not asked, and the reasons.

    >>> print(Audit("make", "training", (Answer("len", "103, and 102 came", "!"),), {}))
    make (expect='training'): 1 fault
    ! len         103, and 102 came
    """

    name: str
    expect: str | None
    answers: tuple[Answer, ...]
    not_asked: Mapping[str, str]

    @property
    def findings(self) -> list[str]:
        """The faults, as phrases: "len: 103, and 102 came"."""
        return [f"{question}: {text}" for question, text, mark in self.answers if mark == "!"]

    def __str__(self) -> str:
        count = len(self.findings)
        return "\n".join(
            [
                f"{self.name} (expect={self.expect!r}): "
                f"{count or 'no'} fault{'' if count == 1 else 's'}",
                *(f"{mark} {question:11} {text}" for question, text, mark in self.answers),
                *(f"  not asked: {name} ({reason})" for name, reason in self.not_asked.items()),
            ]
        )
