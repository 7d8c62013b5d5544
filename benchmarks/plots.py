"""Draws the pictures of docs/benchmarks.md and docs/scaling.md from the figures that are in them; measures nothing.

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

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.alpha_beta import Link, best, efficiency, fit, ring
from benchmarks.convnets import MODELS, step_of
from benchmarks.predict_scaling import BATCH, HOROVOD, IMAGES_PER_SECOND, MEASURED, RANKS, faster, read
from spark_hvd.runner.watch.display.figures import COLOURS, Curve, draw, figure_of

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
    lines = text.partition("\n## ")[0].splitlines() if found else []
    for number, line in enumerate(lines):
        heads = _cells(line)
        if column in heads and lines[number + 1].startswith("|--"):
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(_cells(row))
            return Table(heads, tuple(rows))
    raise ValueError(f"{page.name}: no table with a column {column!r} below {heading!r}")


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|")) if line.startswith("|") else ()


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


def _legend_below(figure: Figure, axes: Axes) -> None:
    """Move the legend to where it hides nothing."""
    legend = axes.get_legend()
    assert legend is not None
    legend.remove()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7, frameon=False)


def _predicted(axes: Axes) -> None:
    link = fit(read(MEASURED.read_text().splitlines()))
    fast, rdma = faster(link, 1.0, 25.0), faster(link, 1.0, 25.0, 10e-6)
    kinds: list[tuple[str, Link, Callable[[Link, int, int], float]]] = [
        ("25 Gbit/s RDMA", rdma, best),
        ("25 Gbit/s TCP", fast, ring),
        ("1 Gbit/s TCP (fitted)", link, ring),
    ]
    curves = []
    for model, colour in (("ResNet-101", COLOURS[0]), ("VGG-16", COLOURS[1])):
        step = step_of(MODELS[model], BATCH / IMAGES_PER_SECOND[model])
        for (network, each, cost), dash in zip(kinds, ("-", "-.", ":"), strict=True):
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
    legend = bandwidth.get_legend()
    assert legend is not None
    legend.remove()
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {"scaling": scaling, "allreduce": allreduce, "mpi": mpi}
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
