"""MPI libraries of all ranks are compared before MPI starts."""

from __future__ import annotations

import json

import pytest

from spark_hvd.runner.rank.static import MpiMismatchError, check_same_mpi, library_version
from spark_hvd.transport.torch_private import HashStore, PrefixStore
from spark_hvd.world.layout import WorldLayout


def check(others: list[str]) -> None:
    """Let rank 0 check; the others have reported their libraries."""
    kv = HashStore()
    for rank, version in enumerate(others, 1):
        PrefixStore("mpi", kv).set(f"fact/{rank}", json.dumps([version, f"host{rank}"]))
    layout = WorldLayout.from_hosts([f"host{rank}" for rank in range(len(others) + 1)])
    check_same_mpi(layout.ranks[0], kv)


def test_the_version_of_the_library_that_mpi4py_loads() -> None:
    assert library_version().startswith("MPICH Version: 5.0")


def test_equal_libraries_pass() -> None:
    check([library_version()] * 2)


def test_different_libraries_are_named_with_their_hosts() -> None:
    with pytest.raises(
        MpiMismatchError, match=r"MPICH Version: 4\.2 on host2; MPICH Version: 5\.0.* on host0, host1\."
    ):
        check([library_version(), "MPICH Version: 4.2"])


def test_a_host_without_a_library_is_named() -> None:
    with pytest.raises(MpiMismatchError, match="none on host1"):
        check(["none"])
