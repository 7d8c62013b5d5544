"""Hosts and clusters for the tests of this folder, started once a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multihost.hosts import Hosts, make_hosts, why_not
from tests.multihost.standalone import Cluster, make_cluster


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where hosts cannot be made."""
    if (reason := why_not()) is not None:
        pytest.skip(f"hosts cannot be made here: {reason}")


@pytest.fixture(scope="module")
def net(namespaces: None) -> Iterator[Hosts]:
    """Two hosts."""
    with make_hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def two_hosts(net: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Spark cluster on two hosts with two slots each."""
    with make_cluster(net, tmp_path_factory.mktemp("cluster"), cores=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_slots(net: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Spark cluster on two hosts with one slot each, so that two ranks are on two hosts."""
    with make_cluster(net, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
