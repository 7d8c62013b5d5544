"""The doctor's report, as a table or as JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from spark_hvd.runner.terminal import harmless
from spark_hvd.world.words import count


class Level(str, Enum):
    """How much a finding matters."""

    __module__ = "spark_hvd.runner"

    OK = "OK"
    WARNING = "warning"  # runs work, but slower or less safely than they could
    ERROR = "error"  # a run will fail


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: What was examined, in a word or two.
        level: OK, warning or error.
        found: What was found, with hosts, values and settings by name.
        remedy: What to do, as a setting or a command to copy; empty if there is nothing to do.
    """

    __module__ = "spark_hvd.runner"

    check: str
    level: Level
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Return a finding without problems."""
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that makes a run slower or less safe than it could be."""
    return Finding(check, Level.WARNING, found, remedy)


def error(check: str, found: str, remedy: str = "") -> Finding:
    """Return a finding that makes a run fail."""
    return Finding(check, Level.ERROR, found, remedy)


@dataclass(frozen=True, repr=False)
class Report:
    """All findings of one examination. It prints as a table, also in a notebook.

    Attributes:
        subject: What was examined: the number of ranks and the Spark master.
        findings: The findings, in the order of the checks.
        seconds: Duration of the examination.
    """

    __module__ = "spark_hvd.runner"

    subject: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there are no errors; there may be warnings."""
        return not self.errors

    @property
    def errors(self) -> list[Finding]:
        """The findings that make a run fail."""
        return [finding for finding in self.findings if finding.level is Level.ERROR]

    @property
    def warnings(self) -> list[Finding]:
        """The findings that make a run slower or less safe."""
        return [finding for finding in self.findings if finding.level is Level.WARNING]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict of ``ok``, ``subject``, ``seconds``, and ``findings``, a list of dicts."""
        findings = [{**asdict(finding), "level": finding.level.value} for finding in self.findings]
        return {"ok": self.ok, "subject": self.subject, "seconds": round(self.seconds, 3), "findings": findings}

    def to_json(self, indent: int | None = 2) -> str:
        """Return the report as JSON text, with the keys of :meth:`as_dict`."""
        return json.dumps(self.as_dict(), indent=indent)

    def __repr__(self) -> str:
        return self.table(shutil.get_terminal_size((120, 24)).columns)

    def table(self, width: int) -> str:
        """Return the report as text, at most ``width`` columns wide unless a single word is longer."""
        column = max((len(finding.check) for finding in self.findings), default=0) + 2
        level = max(len(each.value) for each in Level) + 2
        lines = [f"spark_hvd doctor: {self.subject}", ""]
        for finding in self.findings:
            head = f"{finding.level.value:<{level}}{finding.check:<{column}}"
            lines += _wrapped(finding.found, head, " " * len(head), width)
            for remedy in finding.remedy.splitlines():
                lines += _wrapped(remedy, " " * len(head) + "-> ", " " * (len(head) + 3), width)
        return harmless("\n".join([*lines, "", self._verdict()]), colors=False)

    def _verdict(self) -> str:
        counts = Counter(finding.level for finding in self.findings)
        parts = [f"{counts[Level.OK]} OK", count(counts[Level.WARNING], "warning"), count(counts[Level.ERROR], "error")]
        names = ", ".join(dict.fromkeys(finding.check for finding in self.errors))
        verdict = f"A run will not work yet: see {names}." if names else "A run will work."
        return f"{', '.join(parts)} in {self.seconds:.1f} s. {verdict}"


def _wrapped(text: str, first: str, rest: str, width: int) -> Sequence[str]:
    # Readers copy settings and commands, so lines break only between words.
    return textwrap.wrap(
        text,
        max(width, len(first) + 30),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]
