"""Where the time of a trace went: pure functions from its events to figures.

Spans overlap: a rank has several buckets on the wire at once, and fused tensors share one all-reduce. So times are
lengths of unions of intervals, never sums of spans. Times are nanoseconds here, milliseconds in the figures.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from spark_hvd.timeline import recorder as trace
from spark_hvd.timeline.events import ParsedTrace, PhaseKind, Span, kind_of

Interval = tuple[int, int]

TOP = 10
"""Rows in a list of the largest."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's time."""

    rank: int
    name: str
    traced_ms: float
    """The time from the rank's first event to its last."""
    negotiation_ms: float
    queue_ms: float
    pack_ms: float
    """Into and out of the buffers in which tensors travel."""
    wire_ms: float
    wait_ms: float
    steps: int
    step_ms: float
    """All steps together; so are the two below, which are parts of it."""
    exposed_ms: float
    """Steps could do nothing but wait for communication."""
    overlapped_ms: float
    """Something was on the wire while the steps went on."""


@dataclass(frozen=True, slots=True)
class RowTime:
    """How long one tensor or bucket took."""

    row: str
    times: int
    """How often, on the rank that has most."""
    ms: float
    """All times together, averaged over the ranks."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that was last to be ready, at least once."""

    rank: int
    last: int
    """How often."""
    of: int
    """How many collectives the figures are of."""
    late_ms: float
    """From the last but one being ready until it was, all times together; those of several rows may overlap."""


@dataclass(frozen=True, slots=True)
class TimelineSummary:
    """Where the time of a trace went."""

    truncated: bool
    ranks: Sequence[RankTimes]
    stragglers: Sequence[Straggler]
    """The ranks that were last in negotiations, the most frequent first."""
    bucket_stragglers: Sequence[Straggler]
    """Where nothing is negotiated: last to send what the others had sent already."""
    row_stragglers: Mapping[str, Straggler]
    """The rank that was most often the last, of each tensor or bucket."""
    top_wire: Sequence[RowTime]
    top_negotiation: Sequence[RowTime]


# ---- intervals ----------------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that are in order and lie apart; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif start < end:
            merged.append((start, end))
    return merged


def common(ours: Iterable[Interval], theirs: Iterable[Interval]) -> list[Interval]:
    """The moments in both."""
    left, right = union(ours), union(theirs)
    found = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> int:
    """How long the union of intervals is."""
    return sum(end - start for start, end in union(intervals))


# ---- figures ------------------------------------------------------------------------------------------------------


def summarize(events: ParsedTrace) -> TimelineSummary:
    """Work out all figures of a trace."""
    spans: dict[int, list[Span]] = defaultdict(list)
    moments: dict[int, list[int]] = defaultdict(list)
    for span in events.spans:
        spans[span.rank].append(span)
        moments[span.rank] += span.start, span.end
    for instant in events.instants:
        moments[instant.rank].append(instant.at)
    negotiated = _spans_by_row(events.spans, PhaseKind.NEGOTIATE)
    on_wire = _spans_by_row(events.spans, PhaseKind.WIRE)
    marks = _ready_marks(events)
    negotiations = {row: _outcomes(found, marks.get(row, [])) for row, found in negotiated.items()}
    launches = {row: _outcomes(found, []) for row, found in on_wire.items() if row not in negotiated}
    by_row = {row: _stragglers(outcomes) for row, outcomes in (negotiations | launches).items()}
    return TimelineSummary(
        truncated=events.truncated,
        ranks=[
            _times_of(rank, events.names.get(rank, f"rank {rank}"), spans[rank], max(times) - min(times))
            for rank, times in sorted(moments.items())
        ],
        stragglers=_stragglers(itertools.chain(*negotiations.values())),
        bucket_stragglers=_stragglers(itertools.chain(*launches.values())),
        row_stragglers={row: found[0] for row, found in by_row.items() if found},
        top_wire=_top_rows(on_wire),
        top_negotiation=_top_rows(negotiated),
    )


def _times_of(rank: int, name: str, spans: Sequence[Span], traced: int) -> RankTimes:
    spent: dict[PhaseKind, list[Interval]] = defaultdict(list)
    for span in spans:
        spent[kind_of(span.phase)].append((span.start, span.end))
    steps = spent[PhaseKind.STEP]
    exposed = length(common(steps, spent[PhaseKind.WAIT]))
    communicating = length(common(steps, spent[PhaseKind.WAIT] + spent[PhaseKind.WIRE]))
    return RankTimes(
        rank=rank,
        name=name,
        traced_ms=_ms(traced),
        negotiation_ms=_ms(length(spent[PhaseKind.NEGOTIATE])),
        queue_ms=_ms(length(spent[PhaseKind.QUEUE])),
        pack_ms=_ms(length(spent[PhaseKind.PACK])),
        wire_ms=_ms(length(spent[PhaseKind.WIRE])),
        wait_ms=_ms(length(spent[PhaseKind.WAIT])),
        steps=len(steps),
        step_ms=_ms(length(steps)),
        exposed_ms=_ms(exposed),
        overlapped_ms=_ms(communicating - exposed),
    )


def _spans_by_row(spans: Sequence[Span], activity: PhaseKind) -> dict[str, list[Span]]:
    rows: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if kind_of(span.phase) is activity:
            rows[span.row].append(span)
    return rows


def _top_rows(rows: Mapping[str, Sequence[Span]]) -> list[RowTime]:
    times = []
    for row, spans in rows.items():
        ranks: dict[int, list[Interval]] = defaultdict(list)
        for span in spans:
            ranks[span.rank].append((span.start, span.end))
        times.append(RowTime(row, max(map(len, ranks.values())), _ms(fmean(map(length, ranks.values())))))
    return sorted(times, key=lambda time: (-time.ms, time.row))[:TOP]


# ---- who was last -------------------------------------------------------------------------------------------------

Mark = tuple[int, int]
"""When a rank was ready, and which."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Who was last to be ready for one collective."""

    rank: int | None
    """The rank that was last; None in a tie."""
    late: Interval
    """The time from when the last but one was ready until it was."""


def _ready_marks(events: ParsedTrace) -> dict[str, list[Mark]]:
    marks: dict[str, list[Mark]] = defaultdict(list)
    for instant in events.instants:
        if instant.phase == trace.RANK_READY:
            marks[instant.row].append((instant.at, int(instant.args.get("rank", instant.rank))))
    return marks


def _outcomes(spans: Sequence[Span], marks: Sequence[Mark]) -> list[_Outcome]:
    """Who was last, for each collective of a row that at least two ranks took part in.

    A rank is ready when a mark says so, whichever rank recorded that; else when its own span begins.
    """
    collectives = _collectives(spans)
    outcomes = []
    for collective, said in zip(collectives, _nearest(collectives, sorted(marks)), strict=True):
        ready = {span.rank: span.start for span in collective}
        ready |= {rank: at for at, rank in reversed(said)}  # the earliest of a rank counts
        if len(ready) > 1:
            *_, (before, _), (at, rank) = sorted((at, rank) for rank, at in ready.items())
            outcomes.append(_Outcome(rank if before < at else None, (before, at)))
    return outcomes


def _collectives(spans: Sequence[Span]) -> list[list[Span]]:
    """Group a row's spans of all ranks: those that overlap, with one of each rank at most, are one collective."""
    groups: list[list[Span]] = []
    end = 0
    for span in sorted(spans, key=lambda span: span.start):
        if not groups or span.start >= end or any(span.rank == other.rank for other in groups[-1]):
            groups.append([])
            end = span.end
        groups[-1].append(span)
        end = max(end, span.end)
    return groups


def _nearest(collectives: Sequence[Sequence[Span]], marks: Sequence[Mark]) -> list[list[Mark]]:
    """Give each mark to the collective nearest in time; clocks agree only so well, so it may lie just outside."""
    ends = [max(span.end for span in collective) for collective in collectives]
    borders = [(end + after[0].start) / 2 for end, after in zip(ends, collectives[1:], strict=False)]
    shares: list[list[Mark]] = [[] for _ in collectives]
    for at, rank in marks:
        shares[bisect_right(borders, at)].append((at, rank))
    return shares


def _stragglers(outcomes: Iterable[_Outcome]) -> list[Straggler]:
    found = list(outcomes)
    last = Counter(outcome.rank for outcome in found if outcome.rank is not None)
    return [
        Straggler(rank, count, len(found), _ms(length(outcome.late for outcome in found if outcome.rank == rank)))
        for rank, count in sorted(last.items(), key=lambda item: (-item[1], item[0]))
    ]


def _ms(ns: float) -> float:
    return ns / 1e6
