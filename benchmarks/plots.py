"""Draws the pictures of the pages of benchmarks from the figures that are in them; measures nothing.

`python -m benchmarks.plots [--out docs/images]`

What is drawn is read from the tables of those pages, and the model from `benchmarks.alpha_beta` and `gloo_1gbit.csv`,
so the pictures say what the pages say. After a table has changed, run it again.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.alpha_beta import Link, efficiency, fit
from benchmarks.convnets import MODELS, step_of
from benchmarks.parameter_server import FAR_BYTES, FAR_LINK, FAR_WAYS
from benchmarks.predict_scaling import BATCH, HOROVOD, IMAGES_PER_SECOND, MEASURED, RANKS, networks, read
from spark_hvd.runner.watch.display.figures import COLOURS, DASHES, Curve, draw, figure_of

MINUTES = 0
DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGES = DOCS / "images"
_TEXT = 8
_TICKS = {4: "4", 1 << 10: "1 KiB", 1 << 15: "32 KiB", 1 << 20: "1 MiB", 1 << 25: "32 MiB"}


@dataclass(frozen=True)
class Table:
    """A table of a page: what its columns are called, and its rows as they are written."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def numbers(self, head: str) -> list[float]:
        """A column as numbers.

        Raises:
            ValueError: there is no such column.
        """
        place = self.heads.index(head)
        return [float(re.sub(r"[,%]", "", row[place])) for row in self.rows]


def table(page: Path, heading: str, column: str) -> Table:
    """The first table below a heading that has a column of this name.

    Raises:
        ValueError: there is none.
    """
    _, found, text = page.read_text().partition(f"\n## {heading}\n")
    try:
        return parsed(text.partition("\n## ")[0] if found else "", column)
    except ValueError:
        raise ValueError(f"{page.name}: no table with a column {column!r} below {heading!r}") from None


def parsed(text: str, column: str) -> Table:
    """The first Markdown table of a text that has a column of this name.

    Raises:
        ValueError: there is none.
    """
    lines = text.splitlines()
    for number, line in enumerate(lines):
        heads = _cells(line)
        if column in heads and lines[number + 1].startswith("|--"):
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(_cells(row))
            return Table(heads, tuple(rows))
    raise ValueError(f"no table with a column {column!r}")


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|")) if line.startswith("|") else ()


def glance() -> Figure:
    """How many times as fast as its peer each measured thing is, and what the limit is."""
    figure, (axes,) = figure_of(8.0, 3.6)
    rows = table(DOCS / "benchmarks.md", "At a glance", "spark_hvd").rows[::-1]
    for place, (_, unit, *figures, peer, _) in enumerate(rows):
        ours, theirs, limit = (float(cell.replace(",", "") or "nan") for cell in figures)
        power = 1 if unit.endswith("/s") else -1
        axes.plot([1, (ours / theirs) ** power], [place, place], color=COLOURS[0], marker="o", ms=5, lw=2)
        axes.plot([(limit / theirs) ** power], [place], color=COLOURS[7], marker="|", ms=12, mew=2, linestyle="")
        axes.annotate(peer.strip("`"), (1, place), (-5, -3), textcoords="offset points", ha="right", fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(0.2, 100)
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"], minor=False)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=_TEXT)
    axes.set_xlabel("times as fast as the peer, whose name is on the left; bar: the limit, where known", fontsize=_TEXT)
    return figure


def scaling() -> Figure:
    """Measured efficiency at two ranks, what the model says of more, and what Horovod published for 512."""
    figure, (measured, predicted) = figure_of(9.0, 3.4, panels=2)
    rows = table(DOCS / "scaling.md", "Measured: two ranks on one machine", "efficiency")
    names = [row[0].replace("two ranks, ", "") for row in rows.rows]
    parts = rows.numbers("efficiency")
    bars = measured.barh(names[::-1], parts[::-1], color=COLOURS[5])
    bars[len(parts) - 1].set_color(COLOURS[7])
    measured.bar_label(bars, [f"{part:.1f} %" for part in parts[::-1]], fontsize=_TEXT, padding=2)
    measured.set_xlim(0, 118)
    measured.grid(visible=False)
    measured.set_xlabel("% of the speed of one rank alone", fontsize=_TEXT)
    measured.set_title("Measured: two ranks on two cores", fontsize=_TEXT + 1, loc="left")
    _predicted(predicted)
    _legend_below(figure, predicted)
    return figure


def _legend_below(figure: Figure, *panels: Axes) -> None:
    """Move the legend of panels to where it hides nothing; other panels, which show the same, have none then."""
    handles: dict[str, Artist] = {}
    for axes in panels:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    for axes in figure.axes:
        if (legend := axes.get_legend()) is not None:
            legend.remove()
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, fontsize=7, frameon=False)


def _predicted(axes: Axes) -> None:
    link = fit(read(MEASURED.read_text().splitlines()))
    kinds = list(networks(link, 1.0, 25.0, 10e-6).items())[1:]
    curves = []
    for model, colour in (("ResNet-101", COLOURS[0]), ("VGG-16", COLOURS[1])):
        step = step_of(MODELS[model], BATCH / IMAGES_PER_SECOND[model])
        for (network, (each, cost)), dash in zip(kinds, (":", "-.", "--", "-"), strict=True):
            parts = [100 * efficiency(step, each, ranks, cost=cost) for ranks in RANKS]
            curves.append(Curve(f"{model}, {network}", RANKS, parts, points=True, colour=colour, dash=dash))
    draw(axes, curves, x="ranks", y="efficiency, %", title="Predicted; dashed: published by Horovod for 512")
    axes.set_xscale("log", base=8)
    axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    axes.set_ylim(0, 105)
    for model, colour, place in (("ResNet-101", COLOURS[0], (110, 2)), ("VGG-16", COLOURS[1], (RANKS[0], -9))):
        part = 100 * HOROVOD[model]
        axes.axhline(part, color=colour, linewidth=0.9, linestyle=(0, (6, 4)))
        said = f"{model}: {part:.0f} %"
        axes.annotate(said, (place[0], part), (0, place[1]), textcoords="offset points", fontsize=7)


def allreduce() -> Figure:
    """By name beside torch.distributed, on Gloo."""
    return _times(
        table(DOCS / "benchmarks.md", "All-reduce by name", "dist.all_reduce us"),
        {
            "dist.all_reduce us": "dist.all_reduce",
            "hvd.allreduce_ by name us": "hvd.allreduce_ by name",
            "hvd.allreduce Average us": "hvd.allreduce, average",
        },
    )


def mpi() -> Figure:
    """MPI, Gloo and named collectives in the same two processes."""
    return _times(
        table(DOCS / "benchmarks.md", "MPI", "mpi4py Allreduce us"),
        {
            "mpi4py Allreduce us": "mpi4py",
            "communicator us": "our communicator, MPI",
            "dist.all_reduce, mpi4py us": "dist.all_reduce, MPI",
            "dist.all_reduce, Gloo us": "dist.all_reduce, Gloo",
            "hvd.allreduce_ by name us": "hvd.allreduce_ by name, MPI",
        },
    )


def _times(rows: Table, columns: dict[str, str]) -> Figure:
    """Time by size, and bytes a second by size."""
    figure, (latency, bandwidth) = figure_of(9.0, 3.2, panels=2)
    sizes = rows.numbers("bytes")
    times = {label: rows.numbers(head) for head, label in columns.items()}
    draw(
        latency, [Curve(label, sizes, each, points=True) for label, each in times.items()], x="bytes", y="microseconds"
    )
    speeds = {label: [size / us / 1e3 for size, us in zip(sizes, each, strict=True)] for label, each in times.items()}
    draw(bandwidth, [Curve(label, sizes, each, points=True) for label, each in speeds.items()], x="bytes", y="GB/s")
    for axes in (latency, bandwidth):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(_TICKS), list(_TICKS.values()))
        axes.minorticks_off()
    latency.set_yscale("log")
    _legend_below(figure, latency)
    return figure


def parameter_server() -> Figure:
    """What the page of parameter servers has measured, and the model far beyond it."""
    return parameter_server_of(table(DOCS / "parameter-server.md", "Measured", "busiest link, x bytes"))


def parameter_server_of(rows: Table, link: Link = FAR_LINK, nbytes: int = FAR_BYTES) -> Figure:
    """Bytes over the busiest link and time of the largest gradients measured, and the model for more workers."""
    figure, (bytes_, times, far) = figure_of(10.5, 3.4, panels=3)
    largest = max(rows.numbers("bytes"))
    kept = [place for place, size in enumerate(rows.numbers("bytes")) if size == largest]
    kinds, workers = [row[rows.heads.index("way")] for row in rows.rows], rows.numbers("workers")
    names = list(dict.fromkeys([*kinds, *FAR_WAYS]))

    def curve(kind: str, x: Sequence[float], y: Sequence[float]) -> Curve:
        number = names.index(kind)
        return Curve(kind, x, y, points=True, colour=COLOURS[number], dash=DASHES[number % len(DASHES)])

    for axes, head in ((bytes_, "busiest link, x bytes"), (times, "ms a step")):
        values = rows.numbers(head)
        curves = []
        for kind in dict.fromkeys(kinds):
            places = [place for place in kept if kinds[place] == kind]
            curves.append(curve(kind, [workers[place] for place in places], [values[place] for place in places]))
        draw(axes, curves, x="workers", y=head, title=f"Measured: {largest / (1 << 20):g} MiB of gradients")
        ticks = sorted(set(workers))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    many = [2**power for power in range(1, 10)]
    modelled = [curve(kind, many, [1e3 * cost(link, nbytes, n) for n in many]) for kind, cost in FAR_WAYS.items()]
    draw(far, modelled, x="workers", y="ms a step", title=f"Model: {nbytes >> 20} MiB, {8e-9 / link.beta:g} Gbit/s")
    far.set_xscale("log", base=2)
    far.set_xticks(many[::2], [str(n) for n in many[::2]])
    far.set_yscale("log")
    _legend_below(figure, times, far)
    return figure


def steps_on_hosts() -> Figure:
    """The model beside what hosts did, as the page of scaling has it."""
    return steps_on_hosts_of(table(DOCS / "scaling.md", "Checked: 2, 4 and 8 hosts", "predicted ms"))


def steps_on_hosts_of(rows: Table) -> Figure:
    """Predicted against measured time, of all-reduces and of steps."""
    figure, panels = figure_of(8.0, 3.4, panels=2)
    kinds = [row[rows.heads.index("what")] for row in rows.rows]
    ways = [row[rows.heads.index("way")] for row in rows.rows]
    measured, predicted = rows.numbers("measured ms"), rows.numbers("predicted ms")
    for axes, whats in zip(panels, (("all-reduce",), ("step", "step, no overlap")), strict=True):
        kept = [place for place, kind in enumerate(kinds) if kind in whats]
        ends = [min(measured[place] for place in kept), max(measured[place] for place in kept)]
        draw(axes, [Curve("as predicted", ends, ends, colour=COLOURS[7])], title=f"{whats[0].capitalize()}s, ms")
        for number, (what, way) in enumerate(dict.fromkeys((kinds[place], ways[place]) for place in kept)):
            places = [place for place in kept if (kinds[place], ways[place]) == (what, way)]
            x, y = [measured[place] for place in places], [predicted[place] for place in places]
            axes.plot(x, y, "o", ms=4, color=COLOURS[number], label=way if len(whats) == 1 else f"{what}, {way}")
        axes.set_xlabel("measured", fontsize=_TEXT)
        axes.set_ylabel("predicted", fontsize=_TEXT)
        axes.legend(fontsize=7, frameon=False)
    for scale in (panels[0].set_xscale, panels[0].set_yscale):
        scale("log")
    return figure


def local_sgd() -> Figure:
    """Each way to train over a slow network: its speed, and its accuracy."""
    figure, (axes,) = figure_of(7.0, 3.4)
    speeds = table(DOCS / "benchmarks.md", "LocalSGD and DiLoCo", "samples/s")
    points = table(DOCS / "benchmarks.md", "LocalSGD and DiLoCo", "points from DDP")
    speed_of = {row[0]: speed for row, speed in zip(speeds.rows, speeds.numbers("of DDP's"), strict=True)}
    both = zip(points.rows, points.numbers("points from DDP"), strict=True)
    for number, (row, point) in enumerate((row, point) for row, point in both if row[0] in speed_of):
        mark = "osD^vP*X"[(number + number // 8) % 8]
        axes.plot([speed_of[row[0]]], [point], mark, color=COLOURS[number % len(COLOURS)], label=row[0])
    axes.axhline(-0.5, color="grey", linewidth=0.9, linestyle=(0, (6, 4)))
    axes.axvline(speed_of["alone"], color="grey", linewidth=0.9, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_xlabel("samples/s, as a multiple of DDP's at 1 Gbit/s; dotted: no exchange at all", fontsize=_TEXT)
    axes.set_ylabel("points of accuracy from DDP", fontsize=_TEXT)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "glance": glance,
    "scaling": scaling,
    "allreduce": allreduce,
    "mpi": mpi,
    "parameter-server": parameter_server,
    "steps-on-hosts": steps_on_hosts,
    "local_sgd": local_sgd,
}
"""Name of the file -> what draws it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the pictures")
    out: Path = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        path = out / f"{name}.png"
        picture().savefig(path, dpi=110)
        print(f"{path} ({path.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
