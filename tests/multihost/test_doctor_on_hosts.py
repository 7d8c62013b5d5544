"""The doctor on two hosts: it examines both, and names a blocked connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_hvd.runner import Level, doctor
from tests.doctor_cases import of
from tests.multihost.standalone import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def broken(two_hosts: Cluster) -> Iterator[Cluster]:
    """Let a test break something, and repair it afterwards."""
    yield two_hosts
    two_hosts.make_whole()


def test_two_hosts_that_are_well(two_hosts: Cluster, tmp_path: Path) -> None:
    report = doctor(two_hosts.session, 4, store=str(tmp_path))
    print(report)
    assert report.ok, str(report)
    names = [host.name for host in two_hosts.net.hosts]
    found = report.findings
    rooms = [finding.found for finding in found if finding.check in ("resources", "cores", "memory", "/dev/shm")]
    assert all(any(name in room for room in rooms) for name in names)
    assert "4 connections between 2 hosts on any port" in of("rank to rank", found).found
    assert of("all-reduce", found).found.startswith("4 ranks, ")


def test_a_blocked_way_between_hosts_is_named(broken: Cluster) -> None:
    first, second = broken.net.hosts
    broken.net.block(first, second.address)
    report = doctor(broken.session, 4)
    print(report)
    blocked = [finding for finding in report.errors if finding.check == "rank to rank"]
    assert {finding.level for finding in blocked} == {Level.ERROR}
    ends = {tuple(name for name in (first.name, second.name) if name in finding.found) for finding in blocked}
    assert ends == {(first.name, second.name)}
    assert not [finding for finding in report.findings if finding.check.startswith("all-reduce")], "it would hang"
    assert of("executor to driver", report.findings).level is Level.OK
