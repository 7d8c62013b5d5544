"""The verdict on a run in which ranks wait: who waits where, for which ranks, and what these do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from spark_hvd.runner.tracebacks import grouped
from spark_hvd.runner.watch.hang.states import RankActivity, RankObservation, RankState, entered, state_of
from spark_hvd.world.words import ranks_text

_LOG_LINES = 40
_CULPRIT_GROUPS = 3
"""Maximum number of groups of ranks named in the first line."""


class Kind(str, Enum):
    """How serious a verdict is."""

    HANG = "hang"  # the run waits, and nobody works on what it waits for
    STRAGGLER = "straggler"  # the run waits for ranks that work slowly
    OVER = "over"  # a hang or straggling that was reported has ended


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Who waits for whom in a run, and why.

    Attributes:
        kind: Hang, straggler, or the end of one.
        text: For the log, at most 40 lines: the headline, then each rank's state, then stacks.
        ranks: The ranks that keep the others waiting, if known.
        seconds: How long the run has waited.
        report: The same text, but with the stacks of all ranks and of any length.
        states: What each rank does, in words.
        stacks: The Python stacks of each rank as written, including threads of libraries.
    """

    kind: Kind
    text: str
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0
    report: str = ""
    states: Mapping[int, str] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """The first line of the verdict."""
        return self.text.partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that has been in a collective for suspiciously long."""

    rank: int
    name: str
    """The name of the collective."""
    ranks: tuple[int, ...] | None
    """The ranks that take part in it; None: all."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _Finding:
    kind: Kind
    headline: str
    culprits: list[int]
    states: list[RankState]


def judge(waits: Sequence[Wait], observations: Mapping[int, RankObservation], patience: float) -> HangVerdict | None:
    """Judge the observations of all ranks.

    ``waits`` has the ranks that have waited for longer than ``patience`` seconds; it is empty if ranks have only gone
    silent.

    Returns:
        The verdict; None if all is well.
    """
    finding = _waiting(waits, observations, patience) if waits else _silent(observations)
    if finding is None:
        return None
    stacks = {rank: seen.stacks for rank, seen in observations.items() if seen.stacks.strip()}
    head = [finding.headline, *(f"  {line}" for line in _state_lines(finding.states))]
    reported = logged = _stack_lines(stacks, finding.culprits)
    if finding.kind is Kind.STRAGGLER:  # the stacks of the others do not matter
        logged = _stack_lines({rank: stack for rank, stack in stacks.items() if rank in finding.culprits}, ())
    room = max(_LOG_LINES - len(head), 1)
    if len(logged) > room:
        logged = [*logged[: room - 1], f"  ... ({len(logged) - room + 1} more lines of stacks)"]
    return HangVerdict(
        kind=finding.kind,
        text="\n".join([*head, *logged]),
        ranks=tuple(finding.culprits),
        seconds=max([wait.seconds for wait in waits] or [observations[rank].age for rank in finding.culprits]),
        report="\n".join([*head, *reported]),
        states={state.rank: state.words for state in finding.states},
        stacks=stacks,
    )


def _waiting(waits: Sequence[Wait], observations: Mapping[int, RankObservation], patience: float) -> _Finding | None:
    """Return the finding if ranks wait; None if they wait for good reason, or all entered less than `patience` ago."""
    # The longest wait in each collective, the longest of all first.
    collectives: dict[tuple[str, tuple[int, ...] | None], float] = {}
    for wait in sorted(waits, key=lambda wait: -wait.seconds):
        collectives.setdefault((wait.name, wait.ranks), wait.seconds)
    states = {
        (name, ranks): [
            state_of(observations[rank], name, ranks)
            for rank in (observations if ranks is None else ranks)
            if rank in observations
        ]
        for name, ranks in collectives
    }
    # A rank that waits in another collective waits for others itself. The cause is a rank that waits in none.
    for key, seconds in collectives.items():
        guilty = [
            each
            for each in states[key]
            if each.activity not in (RankActivity.WAITS, RankActivity.ELSEWHERE, RankActivity.JOINED)
        ]
        if guilty:
            return _kept_waiting(*key, seconds, states[key], guilty, observations)
    for key in collectives:
        entries = [entered(observations[state.rank], *key) for state in states[key]]
        seconds_in = [entry.seconds for entry in entries if entry is not None]
        if len(seconds_in) == len(entries):
            return _all_entered(key[0], min(seconds_in), states[key]) if min(seconds_in) >= patience else None
    return _crossed(max(collectives.values()), observations)


def _kept_waiting(
    name: str,
    ranks: tuple[int, ...] | None,
    seconds: float,
    states: list[RankState],
    guilty: list[RankState],
    observations: Mapping[int, RankObservation],
) -> _Finding | None:
    """Return the finding if members do something other than wait in collectives; `guilty` are these, at least one."""
    # Waiting does not help if a process is stopped or gone. An idle rank, though, may be waiting for a straggler.
    dead = [
        state for state in guilty if state.activity in (RankActivity.STOPPED, RankActivity.SILENT, RankActivity.ENDED)
    ]
    busy = [state for state in guilty if state.works or state.activity is RankActivity.MOVES]
    slow = bool(busy) and not dead
    if slow and name.startswith("join "):
        return None  # join is meant to wait for ranks that still have data
    culprits = dead or busy or guilty
    numbers = [state.rank for state in culprits]
    one = len(numbers) == 1
    waiting = [state.rank for state in states if state.activity is RankActivity.WAITS]
    who = ranks_text(waiting) if waiting else "others"
    wait = "waits" if len(waiting) == 1 else "wait"
    if slow:
        return _Finding(
            Kind.STRAGGLER,
            f"{ranks_text(numbers)} {'keeps' if one else 'keep'} {who} waiting in {name}, for {seconds:.0f} s so far: "
            f"{_doing(culprits)}",
            numbers,
            states,
        )
    inside = all(entered(observations[rank], name, ranks) is not None for rank in numbers)
    absent = "" if inside else f", which {'has' if one else 'have'} not entered it"
    return _Finding(
        Kind.HANG,
        f"no progress for {seconds:.0f} s: {who} {wait} in {name} for {ranks_text(numbers)}"
        f"{absent}: {_doing(culprits)}",
        numbers,
        states,
    )


def _all_entered(name: str, seconds: float, states: list[RankState]) -> _Finding:
    everyone = [state.rank for state in states]
    if any(state.works for state in states):
        text = (
            f"{name} has taken {seconds:.0f} s since the last of {ranks_text(everyone)} entered it; they are working. "
            "If it does not end: is there much data, or is the network slow?"
        )
        return _Finding(Kind.STRAGGLER, text, everyone, states)
    text = (
        f"no progress for {seconds:.0f} s: {ranks_text(everyone)} have all entered {name}, but nothing happens. Has "
        "the network between them failed, or does a firewall drop their packets?"
    )
    return _Finding(Kind.HANG, text, everyone, states)


def _crossed(seconds: float, observations: Mapping[int, RankObservation]) -> _Finding:
    """Return the finding if all wait for each other, in collectives that not all of them call."""
    groups: dict[str, list[int]] = {}
    states = []
    for rank, seen in observations.items():
        for one in seen.pending()[:1]:
            groups.setdefault(one.name, []).append(rank)
            states.append(state_of(seen, one.name, one.ranks))
    where = ", ".join(f"{ranks_text(ranks)} in {name}" for name, ranks in groups.items())
    return _Finding(
        Kind.HANG,
        f"no progress for {seconds:.0f} s: ranks wait for each other in different collectives, {where}; every rank "
        "must call the same ones",
        sorted(rank for ranks in groups.values() for rank in ranks),
        states,
    )


def _silent(observations: Mapping[int, RankObservation]) -> _Finding | None:
    """Return the finding if no rank is known to wait. A silent rank may be in native code, or have left the world."""
    states = [state_of(seen, "", None) for seen in observations.values()]
    dead = [
        state
        for state in states
        if state.activity is RankActivity.STOPPED
        or (state.activity is RankActivity.SILENT and observations[state.rank].examination is None)
    ]
    numbers = [state.rank for state in dead]
    return _Finding(Kind.HANG, f"no sign of life: {_doing(dead)}", numbers, dead) if dead else None


def _doing(states: Sequence[RankState]) -> str:
    """Return what ranks are doing, in one phrase for all that are doing the same."""
    groups: dict[str, list[int]] = {}
    for state in states:
        groups.setdefault(state.words, []).append(state.rank)
    parts = [f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} {words}" for words, ranks in groups.items()]
    return "; ".join(parts[:_CULPRIT_GROUPS] + ["..."] * (len(parts) > _CULPRIT_GROUPS))


def _state_lines(states: Sequence[RankState]) -> list[str]:
    """Return a line for each rank, and a single line for ranks that wait together for nearly the same time."""
    together: dict[str, str] = {}
    lines: dict[str, list[int]] = {}
    for state in states:
        words = state.words + state.last
        if state.collective:
            words = together.setdefault(state.collective, words)
        lines.setdefault(words, []).append(state.rank)
    return [f"{ranks_text(ranks)}: {words}" for words, ranks in sorted(lines.items(), key=lambda item: item[1])]


def _stack_lines(stacks: Mapping[int, str], culprits: Sequence[int]) -> list[str]:
    """Return lines with stacks, the most relevant ranks first."""
    groups = sorted(grouped(stacks), key=lambda group: (not set(group[0]) & set(culprits), group[0]))
    lines: list[str] = []
    for ranks, stack in groups:
        lines.append(f"  stack of {ranks_text(ranks)}, outermost call first:")
        lines += [f"    {line}" for line in stack]
    return lines
