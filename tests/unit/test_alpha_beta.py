"""The model of scaling: what its formulas give at their limits, and that a fit finds the link that made the samples."""

from __future__ import annotations

import random

import pytest

from benchmarks.alpha_beta import (
    Bucket,
    Link,
    Sample,
    Step,
    best,
    doubling,
    efficiency,
    fit,
    relative_errors,
    ring,
    step_seconds,
)
from benchmarks.convnets import FORWARD_PART, MODELS, step_of
from benchmarks.predict_scaling import bytes_per_second, faster, prediction_table, read

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
        fit([Sample(2, 4, 1.0), Sample(2, 1 << 20, 0.1)])  # larger ones faster


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
    assert each < 0.05  # so that a bucket has arrived before the next is ready
    assert step_seconds(STEP, LINK, 8) == pytest.approx(0.3 + each)  # the last one only
    assert step_seconds(STEP, LINK, 8, overlap=False) == pytest.approx(0.3 + 3 * each)


def test_buckets_queue_behind_a_slow_one() -> None:
    slow = Link(0.0, 1e-6)
    first = STEP.forward + STEP.backward * 0.25
    assert step_seconds(STEP, slow, 2) == pytest.approx(first + 3 * ring(slow, 1 << 20, 2))


@pytest.mark.parametrize(
    ("name", "parameters", "work"),
    # of torchvision's models, and in multiplications for an image of 224 x 224
    [("ResNet-50", 25_557_032, 4.09e9), ("ResNet-101", 44_549_160, 7.80e9), ("VGG-16", 138_357_544, 15.47e9)],
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
    table = prediction_table({"a network": Link(0.0, 1e-12), "RDMA": Link(1.0, 1.0)}).splitlines()
    assert len(table) == 2 + 2 * len(MODELS)
    assert "| ResNet-50 | a network | 100% | 100% | 100% | 100% |  |" in table
    assert "| VGG-16 | RDMA | 0% | 0% | 0% | 0% | 68% |" in table
