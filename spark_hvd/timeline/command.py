"""The command that reads timelines: ``python -m spark_hvd.timeline summary FILE``, or ``plot FILE --out PICTURE``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from spark_hvd.timeline.events import NotATraceError, ParsedTrace, parse_trace
from spark_hvd.timeline.summary import RankTimes, RowTime, Straggler, TimelineSummary, summarize


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments; those of the process by default.

    Returns:
        The exit status: 1 if the file is of no use or the picture cannot be made; what is wrong goes to stderr.
    """
    arguments = _parser().parse_args(argv)
    try:
        events = read_trace(arguments.file)
    except OSError as error:
        return _fail(f"cannot read {arguments.file}: {error.strerror}")
    except NotATraceError as error:
        return _fail(f"{arguments.file} cannot be used: {error}")
    if arguments.command == "plot":
        return _plot(events, arguments.out, arguments.from_ms, arguments.to_ms)
    summary = summarize(events)
    print(json.dumps(asdict(summary), indent=2) if arguments.json else describe(summary))
    return 0


def read_trace(path: Path) -> ParsedTrace:
    """Read a timeline's file.

    Raises:
        NotATraceError: It is no trace, or has no events.
        OSError: It cannot be read.
    """
    try:
        return parse_trace(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise NotATraceError("it is no text") from None


def describe(summary: TimelineSummary) -> str:
    """A summary as text."""
    names = {rank.rank: rank.name for rank in summary.ranks}
    sections = [
        _times_text(summary.ranks),
        _steps_text(summary.ranks),
        _stragglers_text("Last to be ready, in negotiation", summary.stragglers, names),
        _stragglers_text("Last to have a bucket filled", summary.bucket_stragglers, names),
        _rows_text("Longest on the wire", summary.top_wire, summary.row_stragglers),
        _rows_text("Longest in negotiation", summary.top_negotiation, summary.row_stragglers),
    ]
    if summary.truncated:
        sections.insert(0, "The file ends early, so its process did: this is what was written until then.")
    return "\n\n".join(section for section in sections if section)


def _times_text(ranks: Sequence[RankTimes]) -> str:
    rows = [["ms", "traced", "negotiation", "queue", "packing", "on the wire", "waiting"]]
    for rank in ranks:
        parts = rank.negotiation_ms, rank.queue_ms, rank.pack_ms, rank.wire_ms, rank.wait_ms
        rows.append([rank.name, f"{rank.traced_ms:.1f}", *(_part(part, rank.traced_ms) for part in parts)])
    return _table("Where the time went (activities overlap)", rows)


def _steps_text(ranks: Sequence[RankTimes]) -> str:
    rows = [["", "steps", "ms a step", "waiting for communication", "communication hidden behind computation"]]
    for rank in ranks:
        if rank.steps:
            exposed, hidden = (_part(part, rank.step_ms) for part in (rank.exposed_ms, rank.overlapped_ms))
            rows.append([rank.name, str(rank.steps), f"{rank.step_ms / rank.steps:.2f}", exposed, hidden])
    return _table("Training steps", rows) if len(rows) > 1 else ""


def _stragglers_text(title: str, stragglers: Sequence[Straggler], names: Mapping[int, str]) -> str:
    rows = [["", "times last", "of", "ms later than the last but one"]]
    for one in stragglers:
        rows.append([names.get(one.rank, f"rank {one.rank}"), str(one.last), str(one.of), f"{one.late_ms:.1f}"])
    return _table(title, rows) if stragglers else ""


def _rows_text(title: str, times: Sequence[RowTime], last: Mapping[str, Straggler]) -> str:
    rows = [["ms a rank", "times", "most often last", "name"]]
    for time in times:
        one = last.get(time.row)
        late = f"rank {one.rank} ({one.last} of {one.of})" if one else ""
        rows.append([f"{time.ms:.1f}", str(time.times), late, time.row])
    return _table(title, rows, left=3) if times else ""


def _part(part: float, whole: float) -> str:
    return f"{part:.1f} {100 * part / whole:4.0f} %" if whole else f"{part:.1f}"


def _table(title: str, rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Columns of text; all but number `left` end in line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place == left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([title, *("  " + line.rstrip() for line in lines)])


def _plot(events: ParsedTrace, picture: Path, from_ms: float | None, to_ms: float | None) -> int:
    try:
        from spark_hvd.timeline.plot import draw
    except ModuleNotFoundError as error:
        return _fail(f"plot needs matplotlib ({error}): pip install matplotlib")
    try:
        draw(events, picture, from_ms, to_ms)
    except (OSError, ValueError) as error:
        return _fail(f"cannot draw {picture}: {error}")
    return 0


def _fail(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m spark_hvd.timeline", description="Read a timeline of spark_hvd.")
    commands = parser.add_subparsers(dest="command", required=True)
    summary = commands.add_parser("summary", help="say where the time went and which rank was late")
    summary.add_argument("file", type=Path, help="what hvd.start_timeline wrote")
    summary.add_argument("--json", action="store_true", help="as JSON, times in milliseconds")
    plot = commands.add_parser("plot", help="draw it; needs matplotlib")
    plot.add_argument("file", type=Path, help="what hvd.start_timeline wrote")
    plot.add_argument("--out", type=Path, required=True, help="the picture; its ending says the format, such as .png")
    plot.add_argument("--from-ms", type=float, help="where to begin, in milliseconds from the first event")
    plot.add_argument("--to-ms", type=float, help="where to end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
