"""Who am I: the questions about ranks and hosts, in Horovod's words."""

from __future__ import annotations

from spark_hvd.context import current


def rank() -> int:
    """My rank, 0 to size() - 1. All functions here raise NotInitializedError before init()."""
    return current().world.me.rank


def size() -> int:
    """Number of ranks."""
    return current().world.me.size


def local_rank() -> int:
    """My position among the ranks of my host; commonly the number of my GPU."""
    return current().world.me.local_rank


def local_size() -> int:
    """Number of ranks on my host."""
    return current().world.me.local_size


def cross_rank() -> int:
    """The position of my host among the hosts that have a rank with my local rank."""
    return current().world.me.cross_rank


def cross_size() -> int:
    """Number of hosts that have a rank with my local rank."""
    return current().world.me.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return current().layout.is_homogeneous
