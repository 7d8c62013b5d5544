"""What simulated ranks have launched on NCCL, and whether they could complete it."""

from __future__ import annotations

from tests.gpu_sim.order import Launch, Place, faults_of_order

NAMED, BUCKETS = ("named", 0), ("buckets", 0)


def named(what: str = "sum", *after: Place) -> Launch:
    return Launch(NAMED, 2, what, after)


def bucket(what: str = "bucket", *after: Place) -> Launch:
    return Launch(BUCKETS, 2, what, after)


def test_two_communicators_in_opposite_orders() -> None:
    assert faults_of_order([[named(), bucket()], [bucket(), named()]]) == []


def test_one_communicator_in_opposite_orders() -> None:
    (fault,) = faults_of_order([[named("a"), named("b")], [named("b"), named("a")]])
    assert fault == "order: launch 0 on named is a on rank 0, b on rank 1"


def test_a_rank_that_launches_less() -> None:
    (fault,) = faults_of_order([[named("a"), named("b")], [named("a")]])
    assert fault == "order: launch 1 on named is b on rank 0, nothing on rank 1"
    assert faults_of_order([[Launch(("of one", 0), 1, "a", ())], []]) == []


def test_kernels_that_wait_for_each_other() -> None:
    after_bucket, after_named = named("sum", (BUCKETS, 0)), bucket("bucket", (NAMED, 0))
    assert faults_of_order([[bucket(), after_bucket], [named(), bucket()]]) == []
    (fault,) = faults_of_order([[bucket(), after_bucket], [named(), after_named]])
    assert fault == "order: [(('buckets', 0), 0), (('named', 0), 0)] wait for each other"
    # Through the order on a communicator.
    (fault,) = faults_of_order([[bucket(), after_bucket, named()], [named(), named(), bucket("bucket", (NAMED, 1))]])
    assert "wait for each other" in fault
