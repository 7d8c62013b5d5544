"""A timeline that fails ends and reports that; the collectives that it observes succeed."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.context.global_state import current
from spark_hvd.timeline.recorder import Recorder
from tests.ranks import ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class FailingRecorder(Recorder):
    def span(self, row: str, phase: str, start_ns: int, end_ns: int, **args: Any) -> None:
        raise RuntimeError("no events today")


def failing_send(offset_ns: int, events: Any) -> None:
    raise RuntimeError("no events today")


@pytest.mark.parametrize("fault", ["recording", "sending"])
def test_a_rank_cannot_record(fault: str, tmp_path: Path) -> None:
    def fn() -> tuple[list[float], list[str]]:
        logged: list[logging.LogRecord] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = logged.append  # type: ignore[method-assign]
        logging.getLogger("spark_hvd").addHandler(handler)
        hvd.barrier()
        if hvd.rank() == 0:
            hvd.start_timeline(str(tmp_path / "timeline.json"))
        hvd.barrier()
        if hvd.rank() == 1:
            tracing = current().engine.tracing
            if fault == "recording":
                tracing.recorder = FailingRecorder(lambda events: None)
            else:
                tracing._settled, tracing._send = True, failing_send
                tracing.recorder = Recorder(tracing._ship, batch=1)
        sums = [hvd.allreduce_async(torch.ones(1), op=hvd.Sum).wait(10).item() for _ in range(3)]
        hvd.barrier()
        if hvd.rank() == 0:
            hvd.stop_timeline()
        hvd.barrier()
        return sums, [record.getMessage() for record in logged]

    with ranks(2, timeout=20) as world:
        (zero, no_word), (one, words) = world.run(fn)
    assert zero == one == [2.0, 2.0, 2.0]
    assert no_word == []
    assert words == ["The timeline lacks this rank's latest events and all later ones: RuntimeError: no events today"]
    assert '"name":"ALLREDUCE","pid":0' in (tmp_path / "timeline.json").read_text()
