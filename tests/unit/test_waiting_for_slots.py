"""How long a run waits for executors that register one after the other, on a clock that the test controls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.runner.outcome.errors import NotEnoughSlotsError
from spark_hvd.runner.spark import slots
from spark_hvd.runner.spark.profiles import ResourceRequest

RESOURCES: Any = SimpleNamespace(plan=SimpleNamespace(cpus=1, gpus=0, gpus_there=None, request=ResourceRequest()))


@pytest.mark.parametrize(
    ("comes_at", "settings", "start_timeout", "over_at"),
    [
        ([5, 5], {}, 600, None),
        ([40, 49], {}, 600, None),  # JVMs that take their time
        ([4], {}, 600, 14),
        ([40], {}, 600, 80),
        ([40, 75], {}, 600, None),  # on a busy machine, the second takes as long as the first
        ([], {}, 600, 60),
        ([], {}, 20, 20),
        ([40], {"spark.executor.instances": "2"}, 600, 600),
        ([40, 300], {"spark.executor.instances": "2"}, 600, None),
    ],
)
def test_until_no_more_executors_come(
    comes_at: list[float],
    settings: dict[str, str],
    start_timeout: float,
    over_at: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(
        slots, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.__setitem__(0, now[0] + 1))
    )
    monkeypatch.setattr(slots, "task_slots", lambda *_: sum(now[0] >= each for each in comes_at))
    monkeypatch.setattr(slots, "is_local", lambda _: False)
    monkeypatch.setattr(slots, "conf", lambda _, key: settings.get(key))
    monkeypatch.setattr(slots.spark_private, "count_executors", lambda _: 0)
    spark: Any = None
    if over_at is None:
        assert slots.wait_for_slots(spark, 2, start_timeout, RESOURCES) == 2
        assert now[0] == comes_at[-1]
    else:
        with pytest.raises(NotEnoughSlotsError, match=f"2 slots needed, {len(comes_at)} available"):
            slots.wait_for_slots(spark, 2, start_timeout, RESOURCES)
        assert now[0] == over_at
