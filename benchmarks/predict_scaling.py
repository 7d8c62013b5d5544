"""Predicted efficiency at 8 to 4,096 ranks: the alpha-beta model, fitted on all-reduces of a shaped network.

`python -m benchmarks.predict_scaling [measured.csv] [--measured-gbit 1] [--gbit 25] [--alpha-us 10] [--png FILE]`

The CSV is what `benchmarks.network` prints, of one number of hosts or of several one after the other. Compute times
are of others: see IMAGES_PER_SECOND.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

from benchmarks.alpha_beta import (
    Cost,
    Link,
    Sample,
    best,
    efficiency,
    fit,
    relative_errors,
    ring,
    spread_of,
    two_level,
)
from benchmarks.convnets import MODELS, step_of

MINUTES = 0.1
RDMA = "RDMA"
MEASURED = Path(__file__).with_name("gloo_1gbit.csv")
RANKS = (8, 64, 512, 4096)
PUBLISHED_AT = 512
PER_HOST = 4
"""GPUs of each of Horovod's servers."""
INSIDE = Link(10e-6, 1 / 10e9)
"""Of GPUs in a host, PCIe 3.0 x 16: an assumption."""
BATCH = 64
IMAGES_PER_SECOND = {
    # One P100 with synthetic images, batch 64, float32. TensorFlow's "Benchmarks" of May 2017 (DGX-1).
    "ResNet-50": 219.0,
    "Inception V3": 142.0,
    # An example in Horovod's docs/benchmarks.rst: 1656.82 images/s on 16 of their GPUs; so its own losses are in it.
    "ResNet-101": 1656.82 / 16,
    "VGG-16": 154.0,
}
HOROVOD = {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68}
"""At 512 GPUs with 25 Gbit/s RoCE: arXiv:1802.05799 and Horovod's docs/benchmarks.rst."""


def read(lines: Iterable[str]) -> list[Sample]:
    """The samples of a CSV with the columns hosts, size_bytes and seconds_median."""
    rows = csv.reader(line for line in lines if line[:1].isdigit())  # neither headings nor comments
    return [Sample(int(hosts), int(size), float(seconds)) for hosts, size, seconds in rows]


def bytes_per_second(gbit: float) -> float:
    """Of a line that carries so many Gbit/s."""
    return gbit * 1e9 / 8


def faster(link: Link, measured_gbit: float, gbit: float, alpha: float | None = None) -> Link:
    """The same protocol's share of another line rate."""
    return Link(link.alpha if alpha is None else alpha, link.beta * measured_gbit / gbit)


def fit_table(samples: list[Sample], link: Link) -> str:
    """What was measured beside what the fitted ring gives."""
    lines = ["| ranks | bytes | measured ms | ring, fitted ms | off by |", "|---:|---:|---:|---:|---:|"]
    for sample, error in zip(samples, relative_errors(link, samples), strict=True):
        fitted = 1e3 * sample.seconds * (1 + error)
        lines.append(
            f"| {sample.ranks} | {sample.nbytes:,} | {1e3 * sample.seconds:.2f} | {fitted:.2f} | {error:+.0%} |"
        )
    return "\n".join(lines)


def networks(link: Link, measured_gbit: float, gbit: float, alpha: float) -> dict[str, tuple[Link, Cost]]:
    """Name -> link between hosts and how an all-reduce uses it: Gloo always takes the ring, NCCL chooses.

    Args:
        link: As measured.
        measured_gbit: Its line rate.
        gbit: Line rate of all others.
        alpha: Seconds a message with RDMA.
    """
    tcp, rdma = faster(link, measured_gbit, gbit), faster(link, measured_gbit, gbit, alpha)
    return {
        f"as measured, {measured_gbit:g} Gbit/s, TCP": (link, ring),
        f"{gbit:g} Gbit/s, TCP": (tcp, ring),
        f"{gbit:g} Gbit/s, TCP, two levels": (tcp, two_level(PER_HOST, INSIDE)),
        f"{gbit:g} Gbit/s, {RDMA}": (rdma, best),
        f"{gbit:g} Gbit/s, {RDMA}, two levels": (rdma, two_level(PER_HOST, INSIDE, best)),
    }


def prediction_table(kinds: dict[str, tuple[Link, Cost]]) -> str:
    """Efficiency of each model on each network, at each number of ranks."""
    lines = [
        f"| model | network | {' | '.join(f'{ranks:,}' for ranks in RANKS)} | {PUBLISHED_AT}, no overlap "
        f"| {PUBLISHED_AT}, Horovod published | spread that explains it |"
    ]
    lines.append("|---|---|" + "---:|" * (len(RANKS) + 3))
    for name, rate in IMAGES_PER_SECOND.items():
        step = step_of(MODELS[name], BATCH / rate)
        for network, (link, cost) in kinds.items():
            parts = [efficiency(step, link, ranks, cost=cost) for ranks in RANKS]
            apart = efficiency(step, link, PUBLISHED_AT, overlap=False, cost=cost)
            published = spread = ""
            if name in HOROVOD and RDMA in network:
                published = f"{HOROVOD[name]:.0%}"
                found = spread_of(HOROVOD[name], step, link, PUBLISHED_AT, cost)
                spread = "-" if found is None else f"{found:.1%}"
            cells = " | ".join(f"{part:.0%}" for part in [*parts, apart])
            lines.append(f"| {name} | {network} | {cells} | {published} | {spread} |")
    return "\n".join(lines)


def main() -> None:
    """Fit, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="?", type=Path, default=MEASURED, help="CSV of all-reduces")
    parser.add_argument("--measured-gbit", type=float, default=1.0, help="line rate of the network that was measured")
    parser.add_argument("--gbit", type=float, default=25.0, help="line rate of the network to predict for")
    parser.add_argument("--alpha-us", type=float, default=10.0, help="microseconds a message with RDMA")
    parser.add_argument("--png", type=Path, help="where to draw it, as on the page of scaling")
    given = parser.parse_args()
    samples = read(given.measured.read_text().splitlines())
    link = fit(samples)
    rate = 1 / link.beta / bytes_per_second(given.measured_gbit)
    print(fit_table(samples, link))
    found = f"alpha {1e6 * link.alpha:.0f} us a message, 1/beta {1e-6 / link.beta:.0f} MB/s"
    print(f"\n{found}: {rate:.0%} of the line rate\n")
    print(prediction_table(networks(link, given.measured_gbit, given.gbit, 1e-6 * given.alpha_us)))
    if given.png is not None:
        from benchmarks import plots

        plots.scaling().savefig(given.png, dpi=110)


if __name__ == "__main__":
    main()
