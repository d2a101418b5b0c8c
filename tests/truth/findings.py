"""A false statement: what a view says, and what is true."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A statement that is not true, or that the auditor does not understand."""

    kind: str  #: which sentence: ``overview: steps``
    statement: str
    truth: str

    def __str__(self) -> str:
        return f"{self.kind}\n      says:  {self.statement}\n      truth: {self.truth}"


class Auditor:
    """Collects the false statements of one view; each check names the sentence it reads."""

    def __init__(self, view: str) -> None:
        self.view = view
        self.findings: list[Finding] = []
        self.statements = 0  #: how many were compared with the truth

    def expect(self, holds: bool, kind: str, statement: object, truth: object) -> bool:
        """Note a statement that does not hold."""
        self.statements += 1
        if not holds:
            self.findings.append(Finding(f"{self.view}: {kind}", str(statement), str(truth)))
        return holds

    def equal(self, stated: object, truth: object, kind: str, statement: object = None) -> bool:
        """Note a statement that says something else than the truth."""
        return self.expect(stated == truth, kind, stated if statement is None else statement, truth)

    def unknown(self, statement: str) -> None:
        """Note a line that the auditor does not understand: teach it the sentence."""
        self.expect(False, "not understood", statement, "the auditor has not been taught this sentence")
