"""Hosts and clusters for the tests of this folder, started once per session: modules that share one run together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multihost.hosts import make_hosts, why_not
from tests.multihost.standalone import Cluster, make_cluster

_CLUSTERS = ["two_slots", "two_hosts"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of one cluster next to each other, and tests that start their own last."""

    def place(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", [])
        return next((index for index, name in enumerate(_CLUSTERS) if name in names), len(_CLUSTERS))

    here = [index for index, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    for index, item in zip(here, sorted((items[index] for index in here), key=place), strict=True):
        items[index] = item


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip tests where hosts cannot be created."""
    if (reason := why_not()) is not None:
        pytest.skip(f"hosts cannot be made here: {reason}")


@pytest.fixture(scope="session")
def running() -> Iterator[contextlib.ExitStack]:
    """A function that ends the running cluster; an application has one master, so another cluster ends it first."""
    with contextlib.ExitStack() as stack:
        yield stack


def _cluster(running: contextlib.ExitStack, folder: Path, cores: int) -> Cluster:
    running.close()
    net = running.enter_context(make_hosts(2))
    return running.enter_context(make_cluster(net, folder, cores))


@pytest.fixture(scope="session")
def two_hosts(namespaces: None, running: contextlib.ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A Spark cluster on two hosts with two slots each."""
    return _cluster(running, tmp_path_factory.mktemp("cluster"), cores=2)


@pytest.fixture(scope="session")
def two_slots(namespaces: None, running: contextlib.ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A Spark cluster on two hosts with one slot each, so that two ranks are on two hosts."""
    return _cluster(running, tmp_path_factory.mktemp("cluster"), cores=1)
