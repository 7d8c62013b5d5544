"""An alpha-beta model of training on many ranks: the all-reduce, and buckets that travel while backward goes on.

A message costs alpha seconds, each of its bytes beta seconds. A ring all-reduce sends 2 (n - 1) messages of an n-th of
the bytes (Patarasuk and Yuan 2009); recursive doubling sends all bytes log2 n times, which is less for short ones
(Thakur, Rabenseifner and Gropp 2005). Hosts with several ranks reduce in two levels; parameter servers are what all of
these replaced. Nothing here measures: other modules of this package put numbers in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from statistics import NormalDist

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


def tree(link: Link, nbytes: int, ranks: int) -> float:
    """Seconds of a sum that goes up a binomial tree and comes down again, all bytes at once in each round."""
    return 2 * ceil(log2(ranks)) * (link.alpha + nbytes * link.beta)


def parameter_servers(servers: int) -> Cost:
    """Seconds of pushing gradients to so many servers, each with a host and a part of the parameters, and of pulling.

    The servers' links are the bottleneck until there is one for each worker; then it is the workers' own. Messages of
    different workers are on their way at the same time: each way costs their latency once.
    """

    def cost(link: Link, nbytes: int, ranks: int) -> float:
        return 2 * (link.alpha + max(1.0, ranks / servers) * nbytes * link.beta)

    return cost


def servers_beside_workers(link: Link, nbytes: int, ranks: int) -> float:
    """Seconds where each worker's host also serves an n-th of the parameters: a link carries what a ring's does."""
    return 2 * (link.alpha + (ranks - 1) / ranks * nbytes * link.beta)


def two_level(per_host: int, inside: Link, between: Cost = ring) -> Cost:
    """Seconds of an all-reduce within hosts and between them.

    Ranks of a host scatter and gather over ``inside``; between hosts each rank reduces its slice with its like on
    other hosts. All slices share the host's link, so it carries the bytes of one all-reduce of hosts.

    Args:
        per_host: Ranks on each host.
        inside: What ranks of a host reach each other by.
        between: How each slice is reduced between hosts.
    """

    def cost(link: Link, nbytes: int, ranks: int) -> float:
        local = min(per_host, ranks)
        if ranks % local:
            raise ValueError(f"{ranks} ranks: expected a multiple of the {per_host} ranks of a host")
        hosts = ranks // local
        return ring(inside, nbytes, local) + (between(link, nbytes, hosts) if hosts > 1 else 0.0)

    return cost


def servers_to_match(ranks: int) -> float:
    """Number of servers, each with a host of its own, whose links carry in each direction what a ring's do.

    They are as fast as a ring only where pushing and pulling overlap; one after the other takes twice as long.
    """
    return ranks * ranks / (2 * (ranks - 1))


def bytes_to_match(link: Link, ranks: int) -> float:
    """Size of gradients up to which one server is faster than the ring: it has the fewest messages in a row."""
    return (ranks - 2) * link.alpha / ((ranks - (ranks - 1) / ranks) * link.beta)


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


def slowest(spread: float, ranks: int) -> float:
    """How long the last of the ranks takes to compute, on average, as a multiple of a rank's mean.

    The expected largest of so many draws of a normal distribution, by Blom's approximation.

    Args:
        spread: Standard deviation of a rank's time from step to step, as a part of its mean.
        ranks: World size.
    """
    return 1 + spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 1.0


def efficiency(
    step: Step, link: Link, ranks: int, *, overlap: bool = True, cost: Cost = ring, spread: float = 0.0
) -> float:
    """Weak scaling: the step of a rank that is alone by the step of ``ranks`` ranks, each with a batch of its own.

    With ``spread`` all of them wait for the slowest in each step, see :func:`slowest`.
    """
    late = slowest(spread, ranks)
    slow = Step(step.forward * late, step.backward * late, step.buckets)
    return (step.forward + step.backward) / step_seconds(slow, link, ranks, overlap=overlap, cost=cost)


def spread_of(measured: float, step: Step, link: Link, ranks: int, cost: Cost = ring) -> float | None:
    """The spread of compute times that would explain a measured efficiency; None where the network alone loses more."""
    if measured > efficiency(step, link, ranks, cost=cost):
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if efficiency(step, link, ranks, cost=cost, spread=middle) > measured:
            low = middle
        else:
            high = middle
    return high
