"""The scaling model: its formulas at their limits, and a fit that recovers the link that generated the samples."""

from __future__ import annotations

import contextlib
import io
import random
import sys

import pytest

from benchmarks import parameter_server
from benchmarks.alpha_beta import (
    Bucket,
    Link,
    Sample,
    Step,
    best,
    bytes_to_match,
    doubling,
    efficiency,
    fit,
    parameter_servers,
    relative_errors,
    ring,
    servers_beside_workers,
    servers_to_match,
    slowest,
    spread_of,
    step_seconds,
    tree,
    two_level,
)
from benchmarks.convnets import FORWARD_PART, MODELS, step_of
from benchmarks.parameter_server import FAR_WAYS, Measured, far_table, fitted, measured_table
from benchmarks.predict_scaling import bytes_per_second, faster, networks, prediction_table, read
from benchmarks.steps_on_hosts import STEP as SLEPT
from benchmarks.steps_on_hosts import Seen, errors, on_layout, table

LINK = Link(alpha=50e-6, beta=8e-9)  # TCP at 1 Gbit/s
SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20]


def samples(link: Link, ranks: tuple[int, ...] = (2, 4), noise: float = 0.0) -> list[Sample]:
    chance = random.Random(0)
    return [Sample(n, size, ring(link, size, n) * (1 + noise * chance.uniform(-1, 1))) for n in ranks for size in SIZES]


def test_ring_and_doubling() -> None:
    assert ring(LINK, 1000, 2) == pytest.approx(2 * LINK.alpha + 1000 * LINK.beta)
    assert ring(LINK, 10**9, 512) == pytest.approx(2 * 10**9 * LINK.beta, rel=0.01)  # each byte out once, in once
    assert doubling(LINK, 1000, 8) == pytest.approx(3 * (LINK.alpha + 1000 * LINK.beta))
    assert best(LINK, 4, 64) == doubling(LINK, 4, 64)
    assert best(LINK, 10**9, 64) == ring(LINK, 10**9, 64)


@pytest.mark.parametrize("link", [LINK, Link(2e-6, 3.2e-10), Link(1e-3, 8e-8)])
@pytest.mark.parametrize("ranks", [(2,), (2, 4), (8,)])
def test_a_fit_recovers_the_link(link: Link, ranks: tuple[int, ...]) -> None:
    found = fit(samples(link, ranks))
    assert found.alpha == pytest.approx(link.alpha, rel=1e-6)
    assert found.beta == pytest.approx(link.beta, rel=1e-6)
    assert max(map(abs, relative_errors(found, samples(link, ranks)))) < 1e-6


def test_a_fit_of_noisy_samples() -> None:
    found = fit(samples(LINK, noise=0.1))
    assert found.alpha == pytest.approx(LINK.alpha, rel=0.1)
    assert found.beta == pytest.approx(LINK.beta, rel=0.1)


def test_samples_that_do_not_tell() -> None:
    with pytest.raises(ValueError, match="1 samples of 1 sizes: expected two sizes or more"):
        fit([Sample(2, 4, 1e-4)])
    with pytest.raises(ValueError, match="2 samples of 1 sizes"):
        fit([Sample(2, 4, 1e-4), Sample(2, 4, 1.1e-4)])
    with pytest.raises(ValueError, match="expected both above 0"):
        fit([Sample(2, 4, 1.0), Sample(2, 1 << 20, 0.1)])  # larger ones are faster


def test_servers_and_rings_cross_where_it_is_said() -> None:
    big = 1 << 30
    for ranks in (4, 8, 64, 512):
        servers = servers_to_match(ranks)
        assert ranks / 2 < servers <= ranks / 2 + 1
        free = Link(0.0, LINK.beta)
        if servers <= ranks:
            assert 2 * ranks / servers == pytest.approx(2 * ring(free, big, ranks) / (big * LINK.beta))
        nbytes = int(bytes_to_match(LINK, ranks))
        one = parameter_servers(1)
        assert one(LINK, nbytes, ranks) == pytest.approx(ring(LINK, nbytes, ranks), rel=1e-3)
        assert one(LINK, nbytes // 2, ranks) < ring(LINK, nbytes // 2, ranks)
        assert one(LINK, 2 * nbytes, ranks) > ring(LINK, 2 * nbytes, ranks)
    assert bytes_to_match(LINK, 2) == 0  # with two workers the ring is never slower


def test_what_links_of_servers_and_trees_carry() -> None:
    free = Link(0.0, 1.0)
    assert parameter_servers(1)(free, 100, 8) == 2 * 8 * 100
    assert parameter_servers(2)(free, 100, 8) == 8 * 100
    assert parameter_servers(8)(free, 100, 8) == parameter_servers(80)(free, 100, 8) == 200  # the workers' own links
    assert servers_beside_workers(free, 100, 8) == pytest.approx(ring(free, 100, 8))
    assert tree(free, 100, 8) == 2 * 3 * 100


def test_two_levels() -> None:
    inside = Link(1e-6, 1e-10)
    cost = two_level(4, inside)
    assert cost(LINK, 10**8, 4) == ring(inside, 10**8, 4)  # one host
    assert cost(LINK, 10**8, 2) == ring(inside, 10**8, 2)  # a part of one host
    assert cost(LINK, 10**8, 8) == ring(inside, 10**8, 4) + ring(LINK, 10**8, 2)
    flat = ring(LINK, 10**8, 8)
    assert flat / two_level(4, Link(0.0, 0.0))(LINK, 10**8, 8) == pytest.approx(1.75, rel=1e-3)  # the link's limit
    assert flat / two_level(1, inside)(LINK, 10**8, 8) == 1.0
    assert two_level(4, inside, best)(LINK, 4, 512) < cost(LINK, 4, 512) < ring(LINK, 4, 512)
    with pytest.raises(ValueError, match="6 ranks: expected a multiple of the 4 ranks of a host"):
        cost(LINK, 100, 6)


def test_the_slowest_of_many() -> None:
    chance = random.Random(0)
    for ranks in (2, 8, 512):
        drawn = [max(chance.gauss(1.0, 0.03) for _ in range(ranks)) for _ in range(2000)]
        assert slowest(0.03, ranks) == pytest.approx(sum(drawn) / len(drawn), abs=0.002)
    assert slowest(0.03, 1) == slowest(0.0, 512) == 1.0
    free = Link(0.0, 0.0)
    found = spread_of(0.9, STEP, free, 512)
    assert found is not None
    assert efficiency(STEP, free, 512, spread=found) == pytest.approx(0.9)
    assert spread_of(0.9, STEP, Link(1.0, 1.0), 512) is None


def test_tables_of_parameter_servers() -> None:
    sizes = (1 << 10, 1 << 20, 4 << 20)
    rows = [Measured("ring", n, size, ring(LINK, size, n), 1.5 * size, size) for n in (2, 4) for size in sizes]
    rows.append(Measured("ring", 8, 1 << 20, 1.0, 1.0, 1.0))  # measured on many, which do not count
    assert fitted(rows).beta == pytest.approx(LINK.beta)
    written = measured_table(rows, LINK).splitlines()
    assert len(written) == 2 + len(rows)
    assert written[3] == "| 2 | 1,048,576 | ring | 8.49 | 1.00 | 1.50 | 1.00 | 8.49 | +0% |"
    far = far_table(LINK, 1 << 20, [8]).splitlines()
    assert [line.split("|")[1].strip() for line in far[2:-2]] == list(FAR_WAYS)
    assert far[-2:] == [
        "| server hosts whose links carry what a ring's do | 5 |",
        f"| one server is faster up to | {bytes_to_match(LINK, 8) / 1024:,.0f} KiB |",
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--sizes", "2", "1048576", "4194304"], "expected 4 bytes or more"),
        (["--sizes", "1024", "1048576"], "two of 65,536 or more to fit the link to"),
        (["--workers", "1"], "--workers [1]: expected 2 or more"),
    ],
)
def test_what_cannot_be_measured(given: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["parameter_server", *given])
    errors = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stderr(errors):
        parameter_server.main()
    assert said in errors.getvalue()


def test_tables_of_steps_on_hosts() -> None:
    inside = Link(1e-5, 1e-9)
    total = sum(bucket.nbytes for bucket in SLEPT.buckets)
    rows = [
        Seen(2, 1, "all-reduce", "ring", 4, 1e-3),
        Seen(4, 2, "all-reduce", "two levels", 1 << 20, 2 * two_level(2, inside)(LINK, 1 << 20, 8)),
        Seen(4, 2, "step", "two levels", total, step_seconds(SLEPT, LINK, 8, cost=two_level(2, inside))),
        Seen(4, 2, "step, no overlap", "ring", total, step_seconds(SLEPT, LINK, 8, overlap=False)),
    ]
    assert [line.split("|")[-2].strip() for line in table(rows, LINK, inside).splitlines()[3:]] == [
        "-50%",
        "+0%",
        "+0%",
    ]
    # the rows that the link was fitted to do not count
    assert errors(rows, LINK, inside).startswith("all-reduce: off by 50% in the median, 50% at most; step: off by 0%")
    with pytest.raises(ValueError, match="layout '4': expected HOSTSxRANKS"):
        on_layout("4", "none")


STEP = Step(0.1, 0.2, (Bucket(1 << 20, 0.25), Bucket(1 << 20, 0.5), Bucket(1 << 20, 1.0)))


def test_limits_of_efficiency() -> None:
    assert efficiency(STEP, LINK, 1) == 1.0
    assert efficiency(STEP, Link(0.0, 0.0), 512) == 1.0
    assert efficiency(STEP, Link(1.0, 1.0), 2) < 1e-6
    by_ranks = [efficiency(STEP, LINK, n) for n in (2, 8, 64, 512)]
    assert by_ranks == sorted(by_ranks, reverse=True)
    assert efficiency(STEP, LINK, 8, cost=best) >= efficiency(STEP, LINK, 8)


def test_what_overlaps_is_hidden() -> None:
    each = ring(LINK, 1 << 20, 8)
    assert each < 0.05  # so a bucket arrives before the next is ready
    assert step_seconds(STEP, LINK, 8) == pytest.approx(0.3 + each)  # the last one only
    assert step_seconds(STEP, LINK, 8, overlap=False) == pytest.approx(0.3 + 3 * each)


def test_buckets_queue_behind_a_slow_one() -> None:
    slow = Link(0.0, 1e-6)
    first = STEP.forward + STEP.backward * 0.25
    assert step_seconds(STEP, slow, 2) == pytest.approx(first + 3 * ring(slow, 1 << 20, 2))


@pytest.mark.parametrize(
    ("name", "parameters", "work"),
    # For torchvision's models, in multiplications for an image of 224 x 224, or 299 x 299
    [
        ("ResNet-50", 25_557_032, 4.09e9),
        ("ResNet-101", 44_549_160, 7.80e9),
        ("VGG-16", 138_357_544, 15.47e9),
        ("Inception V3", 23_834_568, 5.71e9),
    ],
)
def test_models(name: str, parameters: int, work: float) -> None:
    layers = MODELS[name]
    assert sum(sum(layer.sizes) for layer in layers) == parameters
    assert sum(layer.work for layer in layers) == pytest.approx(work, rel=0.002)
    step = step_of(layers, 0.3)
    assert (step.forward, step.forward + step.backward) == pytest.approx((0.3 * FORWARD_PART, 0.3))
    ready = [bucket.ready for bucket in step.buckets]
    assert ready == sorted(ready)
    assert ready[-1] == pytest.approx(1.0)
    assert 0 <= sum(bucket.nbytes for bucket in step.buckets) - 4 * parameters < 64 * 4 * len(layers)


def test_a_file_of_measurements_becomes_a_table() -> None:
    lines = ["hosts,size_bytes,seconds_median", "4,8,0.001", "2,1048576,0.0085", "# rate 1gbit, 2 hosts: ..."]
    assert read(2 * lines) == 2 * [Sample(4, 8, 0.001), Sample(2, 1 << 20, 0.0085)]
    assert faster(LINK, 1, 25).beta == pytest.approx(1 / bytes_per_second(25))
    written = prediction_table({"a network": (Link(0.0, 1e-12), ring), "RDMA": (Link(1.0, 1.0), ring)}).splitlines()
    assert len(written) == 2 + 2 * len(MODELS)
    assert "| ResNet-50 | a network | 100% | 100% | 100% | 100% | 100% |  |  |" in written
    assert "| VGG-16 | RDMA | 0% | 0% | 0% | 0% | 0% | 68% | - |" in written


def test_two_levels_help_most_where_messages_are_slow() -> None:
    step = step_of(MODELS["ResNet-101"], 0.6)
    kinds = networks(Link(264e-6, 1 / 115e6), 1.0, 25.0, 10e-6)
    parts = {name: efficiency(step, link, 512, cost=cost) for name, (link, cost) in kinds.items()}
    assert parts["25 Gbit/s, TCP, two levels"] > 2 * parts["25 Gbit/s, TCP"]
    assert parts["25 Gbit/s, RDMA, two levels"] >= parts["25 Gbit/s, RDMA"]
