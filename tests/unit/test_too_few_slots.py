"""The message about too few slots: how many there are, and the setting that provides as many as needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.runner.outcome.errors import NotEnoughSlotsError
from spark_hvd.runner.spark import slots
from spark_hvd.runner.spark.profiles import Application, ResourceRequest, TaskResources, plan


def lacking(monkeypatch: pytest.MonkeyPatch, there: int, request: ResourceRequest, **settings: str) -> str:
    """Return the text of the error for 10 tasks if so many can run."""
    monkeypatch.setattr(slots, "task_slots", lambda spark, resources: there)
    monkeypatch.setattr(slots.spark_private, "count_executors", lambda spark: 2)
    settings = {f"spark.{name.replace('_', '.')}": value for name, value in settings.items()}
    spark: Any = SimpleNamespace(conf=SimpleNamespace(get=settings.get))
    cpus, gpus = int(settings.get("spark.task.cpus", "1")), settings.get("spark.task.resource.gpu.amount")
    app = Application(settings["spark.master"], task_cpus=cpus, executor_gpus=1 if gpus else None)
    resources = TaskResources(plan(replace(app, task_gpus=float(gpus) if gpus else None), request), None)
    with pytest.raises(NotEnoughSlotsError) as caught:
        slots.wait_for_slots(spark, 10, 0.0, resources)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"master": "local[4]"}, 'start the session with master("local[10]")'),
        ({"master": "yarn", "executor_cores": "4", "task_cpus": "2"}, "set spark.executor.instances=5 (fewer with"),
        ({"master": "spark://h:7077", "task_cpus": "2"}, "set spark.cores.max=20, and have as many free cores"),
    ],
)
def test_the_setting_is_named(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], more: str) -> None:
    text = lacking(monkeypatch, 4, ResourceRequest(), **settings)
    assert text.startswith("num_proc=10: 10 slots needed, 4 available")
    assert f"{slots.AT_ONCE} Ask for fewer ranks, num_proc=4, or {more}" in text


def test_ranks_are_counted_where_a_task_has_several(monkeypatch: pytest.MonkeyPatch) -> None:
    text = lacking(monkeypatch, 4, ResourceRequest(procs_per_task=2), master="yarn")
    assert text.startswith("num_proc=20, procs_per_task=2: 10 slots needed, 4 available")
    assert "fewer ranks, num_proc=8, or" in text


def test_tasks_that_share_a_gpu_want_parts_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = lacking(monkeypatch, 4, ResourceRequest(), master="local-cluster[2,4,1024]", task_resource_gpu_amount="0.25")
    assert text.startswith(
        "num_proc=10: 10 slots needed, 4 available: 2.5 GPUs needed, 2 available (master local-cluster"
    )
    assert "spark.task.resource.gpu.amount=0.25" in text


def test_where_there_is_no_slot_no_number_of_ranks_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "num_proc=0" not in lacking(monkeypatch, 0, ResourceRequest(), master="yarn")
