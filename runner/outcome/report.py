"""The report of a failed run: first the cause with its complete traceback, then the rest in a line or two each.

Lines of tracebacks and of the user's output are never cut or wrapped, so there are horizontal rules but no vertical
ones. Our own lines have at most 100 columns. Rules use box-drawing characters if this program can write them.
"""

from __future__ import annotations

import locale
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spark_hvd.runner.outcome.next_step import next_step
from spark_hvd.runner.outcome.rows import Failed, FailureKind
from spark_hvd.runner.tracebacks import grouped, trim_traceback
from spark_hvd.runner.watch.hang.verdict import HangVerdict
from spark_hvd.world.words import ranks_text

WIDTH = 100
_VANISHED = re.compile(r"rank (\d+)(?: \(on \S+\))?(?:, which coordinates,)? has ended without notice")
_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class Where:
    """Where a run's ranks are on Spark, and where to read more.

    Attributes:
        executors: Spark's ID of each rank's executor, by rank; unknown ones are missing.
        ui: Address of the stage's page in the Spark UI; empty if there is none.
    """

    executors: Mapping[int, str] = field(default_factory=dict)
    ui: str = ""

    def place(self, failures: Iterable[Failed]) -> list[Failed]:
        """Add its executor to each failure."""
        return [
            failure if failure.executor else replace(failure, executor=self.executors.get(failure.rank, ""))
            for failure in failures
        ]


def failure_report(
    failures: Sequence[Failed],
    size: int,
    finished: Sequence[int] = (),
    hang: HangVerdict | None = None,
    where: Where | None = None,
) -> str:
    """Write the failures of a run as text."""
    first, *others = failures
    error = first.error.splitlines()[0] if first.traceback and first.error else first.error
    cause, advice = _of_the_others(first, others, finished)
    error = f"{cause}: {error}" if cause else error
    lines = [f"rank {first.rank} of {size} failed on host {first.host}: {error}"]
    crashed = first.kind in (FailureKind.SIGNAL, FailureKind.TIMEOUT)
    title = "Rank" if not first.traceback else "Stacks of rank" if crashed else "Traceback of rank"
    shown = _tail(first)
    if first.traceback:
        shown.insert(0, first.traceback.rstrip() if crashed else trim_traceback(first.traceback.rstrip()))
    if not shown:
        lines[0] = f"rank {first.rank} of {size} failed on {_facts(first)}: {error}"
    else:
        lines += [_rule(f"{title} {first.rank} ({_facts(first)})"), *shown]
    if others:
        lines += [_rule("The other ranks"), *_others(others)]
    lines += _hang(hang)
    return "\n".join([*lines, *_end(advice or next_step(first, on_spark=where is not None), where)])


def timeout_report(
    failures: Sequence[Failed], size: int, timeout: float, hang: HangVerdict | None = None, where: Where | None = None
) -> str:
    """Write the report of a run that has exceeded its time, with the stacks of every rank."""
    running = [failure for failure in failures if failure.kind is FailureKind.TIMEOUT]
    lines = [
        f"{ranks_text([f.rank for f in running])} of {size} still running after timeout={timeout:g} s; all were stopped"
    ]
    if hang is not None:
        lines += [_rule("What the ranks did"), *_states(hang)]
    hosts = {failure.rank: failure.host for failure in running}
    for ranks, stack in grouped({failure.rank: failure.traceback or "(none)" for failure in running}):
        on = ", ".join(sorted({hosts[rank] for rank in ranks}))
        lines += [_rule(f"Stacks of {ranks_text(ranks)} on {on}, outermost call first"), *stack]
    for failure in running:
        lines += _tail(failure)
    advice = "Give a larger timeout= if the run needs more time; otherwise see above where each rank was."
    return "\n".join([*lines, *_end(advice, where)])


def _of_the_others(first: Failed, others: Sequence[Failed], finished: Sequence[int]) -> tuple[str, str]:
    """Return the cause of an echo and the remedy, if the other ranks reveal them; otherwise two empty texts."""
    if not first.echo:
        return "", ""
    vanished = _VANISHED.search(first.error)
    stopped = {other.rank for other in others if other.kind is FailureKind.STOPPED}
    if vanished and int(vanished[1]) in stopped:
        return (
            f"the process of rank {vanished[1]} was there and did not answer",
            "The process was suspended (SIGSTOP, or a debugger), or its host was cut off from the others for a while.",
        )
    if finished:
        return (
            f"{ranks_text(finished)} had already returned from fn while it waited for all ranks",
            "Every rank must call the same collectives the same number of times. If some have more batches than "
            "others, call hvd.join() after the loop: a rank then waits for the others without holding them up.",
        )
    return "", ""


def with_hang(text: str, hang: HangVerdict | None) -> str:
    """Return a message, followed by what the ranks did if that is known."""
    return text if hang is None else "\n".join([text, *_hang(hang), _line() * WIDTH])


def _facts(failure: Failed) -> str:
    facts = [f"host {failure.host}"]
    if failure.executor not in ("", "driver"):  # "driver" on a local master
        facts.append(f"executor {failure.executor}")
    if failure.gpus:
        facts.append(f"GPU {failure.gpus}")
    return ", ".join(facts)


def _tail(failure: Failed) -> list[str]:
    return [_rule(f"Last output of rank {failure.rank}"), failure.log_tail.rstrip()] if failure.log_tail else []


def _others(failures: Sequence[Failed]) -> list[str]:
    """Return a line for each different error, and one for all echoes, which differ only in their addresses."""
    groups: dict[str, list[int]] = {}
    echoes = [failure for failure in failures if failure.echo]
    for failure in failures:
        if not failure.echo:
            groups.setdefault(_short(failure.error), []).append(failure.rank)
    # In an elastic run, several processes may have failed that had the same rank one after the other.
    lines = [f"{ranks_text(sorted(set(ranks)))}: {text}" for text, ranks in groups.items()]
    if echoes:
        ranks = ranks_text(sorted({failure.rank for failure in echoes}))
        lines.append(f"{ranks}: {_short(echoes[0].error)} (because of the above)")
    return [
        line for each in lines for line in textwrap.wrap(each, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    ]


def _short(error: str) -> str:
    line = (error.splitlines() or [""])[0]
    return line if len(line) <= _ERROR_CHARS else f"{line[:_ERROR_CHARS]}..."


def _hang(hang: HangVerdict | None) -> list[str]:
    return [] if hang is None else [_rule("What the ranks did before"), *hang.report.splitlines()]


def _states(hang: HangVerdict) -> list[str]:
    """Return the verdict without its stacks, because the report has newer ones."""
    return hang.report.partition("\n  stack of ")[0].splitlines()


def _end(advice: str, where: Where | None) -> list[str]:
    lines = [_rule("Next step"), *textwrap.wrap(advice, WIDTH, break_on_hyphens=False)] if advice else []
    if where is not None and where.ui:
        lines.append(f"{'' if lines else _rule('More') + chr(10)}Spark UI: {where.ui}")
    return [*lines, _line() * WIDTH]


def _rule(title: str) -> str:
    start = f"{_line() * 2} {title} "
    return start + _line() * max(WIDTH - len(start), 2)


def _line() -> str:
    """Return the character for rules; messages are printed, or written to files in the locale's encoding."""
    encodings = [getattr(stream, "encoding", None) for stream in (sys.stdout, sys.stderr)]
    try:
        for encoding in [*encodings, locale.getpreferredencoding(False)]:
            "\u2500".encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return "-"
    return "\u2500"
