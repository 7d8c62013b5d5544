"""What a run's tasks take from executors, decided from settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_hvd.runner.config import RunConfig
from spark_hvd.runner.outcome.errors import ClusterError
from spark_hvd.runner.spark.profiles import Application, ResourceRequest, plan

STANDALONE = Application("spark://a:7077", executor_gpus=4)
MANAGERS = ["spark://a:7077", "local-cluster[2,1,1024]", "yarn", "k8s://https://a:6443", ""]


def test_nothing_asked_is_what_the_application_gives() -> None:
    made = plan(
        Application("yarn", task_cpus=2, task_gpus=0.5, executor_gpus=1, takes_profiles=False), ResourceRequest()
    )
    assert (made.cpus, made.gpus, made.needs_profile, made.may_share) == (2, 0.5, False, True)
    assert plan(Application("yarn"), ResourceRequest()).gpus is None
    assert not plan(Application("yarn"), ResourceRequest()).may_share


@pytest.mark.parametrize("master", MANAGERS)
def test_other_amounts_need_a_profile(master: str) -> None:
    made = plan(replace(STANDALONE, master=master), ResourceRequest(cpus_per_proc=2, gpus_per_proc=1, procs_per_task=2))
    assert (made.cpus, made.gpus, made.needs_profile, made.may_share) == (4, 2.0, True, False)


def test_the_applications_own_amounts_need_none() -> None:
    app = replace(STANDALONE, task_cpus=2, task_gpus=1, takes_profiles=False)
    assert not plan(app, ResourceRequest(2, 1)).needs_profile
    assert not plan(app, ResourceRequest(1, None, procs_per_task=2)).needs_profile
    assert not plan(STANDALONE, ResourceRequest(1, 0)).needs_profile
    assert plan(replace(app, takes_profiles=True), ResourceRequest(2, 0)).gpus == 0
    assert plan(replace(app, takes_profiles=True), ResourceRequest(3)).gpus == 1, "what is not asked for stays"


def test_ranks_of_a_task_may_share_its_gpus() -> None:
    assert plan(replace(STANDALONE, task_gpus=1), ResourceRequest(procs_per_task=2)).may_share
    assert not plan(replace(STANDALONE, task_gpus=2), ResourceRequest(procs_per_task=2)).may_share


@pytest.mark.parametrize(
    ("app", "wanted", "message"),
    [
        (
            Application("yarn"),
            ResourceRequest(gpus_per_proc=1),
            r"gpus_per_proc=1: the executors .* have no GPUs .*spark\.executor\.resource\.gpu\.amount=1, "
            r"spark\.executor\.resource\.gpu\.discoveryScript=.*spark\.task\.resource\.gpu\.amount=1",
        ),
        (
            STANDALONE,
            ResourceRequest(gpus_per_proc=3, procs_per_task=2),
            "procs_per_task=2: a task needs 6 GPUs, and an executor has 4",
        ),
        (
            replace(STANDALONE, executor_cores=4),
            ResourceRequest(5),
            "cpus_per_proc=5: a task needs 5 cores, and an executor has 4",
        ),
        (
            replace(STANDALONE, takes_profiles=False),
            ResourceRequest(2, 1),
            r"before PySpark 4\.0 .*Start it with spark\.task\.cpus=2, spark\.task\.resource\.gpu\.amount=1 \(see",
        ),
        (
            replace(STANDALONE, master="mesos://a"),
            ResourceRequest(2),
            r"not with master mesos://a\. Start it with spark\.task\.cpus=2",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_settings(
    app: Application, wanted: ResourceRequest, message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        plan(app, wanted)


def test_local_mode_counts_for_itself() -> None:
    local = Application("local[4]", task_cpus=2, driver_gpus=2)
    made = plan(local, ResourceRequest(3, 1))
    assert (made.cpus, made.gpus, made.needs_profile, made.gpus_there) == (3, 1.0, False, 2)
    assert plan(local, ResourceRequest(1)).cpus == 2, "Spark counts two for each task whatever we ask"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"cpus_per_proc": 0}, ValueError),
        ({"gpus_per_proc": -1}, ValueError),
        ({"cpus_per_proc": True}, TypeError),
        ({"gpus_per_proc": 0.5}, TypeError),
    ],
)
def test_wrong_arguments(arguments: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{next(iter(arguments))}="):
        RunConfig(**arguments)
