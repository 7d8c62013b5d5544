"""An alpha-beta model of training on many ranks: the all-reduce, and buckets that travel while backward goes on.

A message costs alpha seconds, each of its bytes beta seconds. A ring all-reduce sends 2 (n - 1) messages of an n-th of
the bytes (Patarasuk and Yuan 2009); recursive doubling sends all bytes log2 n times, which is less for short ones
(Thakur, Rabenseifner and Gropp 2005). Nothing here measures; ``benchmarks.scaling`` puts numbers in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np


@dataclass(frozen=True, slots=True)
class Link:
    """The network as one rank sees it.

    Attributes:
        alpha: Seconds a message, whatever its size.
        beta: Seconds a byte.
    """

    alpha: float
    beta: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured all-reduce."""

    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        nbytes: Their size.
        ready: The part of backward, 0 to 1, that is over when the last of them is there.
    """

    nbytes: int
    ready: float


@dataclass(frozen=True, slots=True)
class Step:
    """A training step of one rank.

    Attributes:
        forward: Seconds until backward begins.
        backward: Seconds from there on, on a rank that is alone.
        buckets: In the order in which they become ready.
    """

    forward: float
    backward: float
    buckets: tuple[Bucket, ...]


Cost = Callable[[Link, int, int], float]
"""Seconds of an all-reduce, from the link, the bytes and the ranks."""


def ring(link: Link, nbytes: int, ranks: int) -> float:
    """Seconds of a ring all-reduce; the same where several ranks of a host, next to each other, share its link."""
    return 2 * (ranks - 1) * (link.alpha + nbytes / ranks * link.beta)


def doubling(link: Link, nbytes: int, ranks: int) -> float:
    """Seconds of recursive doubling."""
    return ceil(log2(ranks)) * (link.alpha + nbytes * link.beta)


def best(link: Link, nbytes: int, ranks: int) -> float:
    """Seconds of the faster of the two, as libraries choose by size."""
    return min(ring(link, nbytes, ranks), doubling(link, nbytes, ranks))


def fit(samples: Sequence[Sample]) -> Link:
    """The link for which a ring explains the samples best, by least squares of relative errors.

    Raises:
        ValueError: The samples do not tell alpha and beta apart, or no link with positive costs explains them.
    """
    rows = np.array([[2 * (s.ranks - 1), 2 * (s.ranks - 1) / s.ranks * s.nbytes] for s in samples])
    seconds = np.array([s.seconds for s in samples])
    # Bytes and messages differ by many orders of magnitude; columns of one size keep the solution exact.
    weighted = rows / seconds[:, None]
    scale = np.abs(weighted).max(axis=0)
    if len(samples) < 2 or not scale.all() or np.linalg.matrix_rank(weighted / scale) < 2:
        raise ValueError(
            f"{len(samples)} samples of {len({s.nbytes for s in samples})} sizes: expected two sizes or more"
        )
    solution, *_ = np.linalg.lstsq(weighted / scale, np.ones(len(samples)), rcond=None)
    alpha, beta = solution / scale
    if alpha <= 0 or beta <= 0:
        raise ValueError(f"alpha {alpha:.3g} s, beta {beta:.3g} s/byte: expected both above 0; measure more sizes")
    return Link(float(alpha), float(beta))


def relative_errors(link: Link, samples: Sequence[Sample]) -> list[float]:
    """By how much the ring on this link is off each sample, as a part of the measured time."""
    return [ring(link, s.nbytes, s.ranks) / s.seconds - 1 for s in samples]


def step_seconds(step: Step, link: Link, ranks: int, *, overlap: bool = True, cost: Cost = ring) -> float:
    """Seconds of the step when gradients are reduced over ``ranks`` ranks.

    Buckets travel one after the other, each as soon as it is ready and the one before has arrived; the step ends when
    backward is over and the last one is there. What the model leaves out: ranks of unequal speed, links that others
    use too, and the processor's work on messages, which backward has to share.

    Args:
        step: What a rank does alone.
        link: The network.
        ranks: World size.
        overlap: False to send the first bucket only when backward is over.
        cost: How the all-reduce is done.
    """
    alone = step.forward + step.backward
    if ranks == 1:
        return alone
    free = step.forward
    for bucket in step.buckets:
        ready = step.forward + step.backward * (bucket.ready if overlap else 1.0)
        free = max(free, ready) + cost(link, bucket.nbytes, ranks)
    return max(alone, free)


def efficiency(step: Step, link: Link, ranks: int, *, overlap: bool = True, cost: Cost = ring) -> float:
    """Weak scaling: the step of a rank that is alone by the step of ``ranks`` ranks, each with a batch of its own."""
    return (step.forward + step.backward) / step_seconds(step, link, ranks, overlap=overlap, cost=cost)
