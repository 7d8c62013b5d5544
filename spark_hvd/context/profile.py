"""Profiles the next steps of this rank with torch's profiler, on request. Other steps only pay for one check.

The profiler must start and stop in the training thread, so it does this at the ends of steps. Another thread then reads
and compresses the trace: ``traceEvents`` in Chrome's format, with numbers that only this rank uses. The traces of all
ranks can therefore be concatenated. Times are those of the host's clock.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from spark_hvd.context.global_state import global_state
from spark_hvd.scratch import Scratch, local_directory
from spark_hvd.transport.torch_private import is_profiling
from spark_hvd.world.activity import activity

_PART_BYTES = 512 << 10
_MAX_BYTES = 64 << 20
_LAST_SECONDS = 10.0
"""Seconds for which the end of a function waits until the trace of its last steps is sent."""
_PROCESSES = 1000
"""Number of process ids in the trace that each rank has for its process and its GPUs."""


class StepProfiler:
    """Profiles steps on request; one request at a time.

    ``tell`` sends the fields of a message: the ``number`` of the request; and either an ``error``, or the number of
    ``parts`` (0 only confirms the request), the number ``part`` of this one, and its base64 ``data``. Any thread may
    call it.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        self._send = tell
        self._number = self._left = 0
        self._profiler: Any = None
        self._span: Any = None
        self._on: int | None = None
        self._packing: threading.Thread | None = None

    def ask(self, number: int, steps: int) -> None:
        """Profile ``steps`` steps, beginning at the end of the current one. Any thread may call this."""
        if activity.at_step is not None or (self._packing is not None and self._packing.is_alive()):
            self._tell(number, error="it is still busy with a previous profile")
            return
        self._number, self._left = number, steps
        self._tell(number)
        activity.at_step = self._turn

    def end(self) -> None:
        """Send what was profiled so far, because no step will follow. Call this in the training thread."""
        if self._profiler is not None:
            self._guarded(self._finish)
        elif activity.at_step is not None:
            activity.at_step = None
            self._tell(self._number, error="its function ended before another step")
        if self._packing is not None:
            self._packing.join(_LAST_SECONDS)

    def _turn(self) -> None:
        if self._profiler is None:
            self._guarded(self._start)
        elif threading.get_ident() == self._on:
            self._left -= 1
            self._guarded(self._mark if self._left else self._finish)

    def _mark(self) -> None:
        """End the span of the previous step, and begin that of the next one."""
        self._unmark()
        self._span = torch.profiler.record_function("step")
        self._span.__enter__()

    def _unmark(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        if is_profiling():  # torch would silently replace that profiler
            raise RuntimeError("the program profiles itself at the moment")
        more = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        profiler = profile(activities=[ProfilerActivity.CPU, *more])
        profiler.start()
        self._profiler, self._on = profiler, threading.get_ident()
        self._mark()

    def _finish(self) -> None:
        profiler, number = self._profiler, self._number
        self._unmark()
        profiler.stop()
        self._packing = threading.Thread(
            target=self._guarded, args=[self._pack, profiler, number], name="spark_hvd-profile", daemon=True
        )
        self._packing.start()
        activity.at_step = self._profiler = None  # last, because this allows the next request

    def _pack(self, profiler: Any, number: int) -> None:
        here = global_state.context
        rank, size, host = (0, 1, "") if here is None else (here.world.me.rank, here.world.me.size, here.world.me.host)
        with Scratch("profile", local_directory(os.environ)) as folder:
            path = os.path.join(folder, "trace.json")
            profiler.export_chrome_trace(path)
            with open(path, encoding="utf-8") as file:
                trace = json.load(file)
        text = ",\n".join(json.dumps(each) for each in events_of(trace, rank, size, host, os.getpid()))
        packed = base64.b64encode(gzip.compress(text.encode(), 6)).decode()
        if len(packed) > _MAX_BYTES:
            self._tell(number, error=f"its trace has {len(packed) >> 20} MiB: ask for fewer steps")
            return
        parts = [packed[start : start + _PART_BYTES] for start in range(0, len(packed), _PART_BYTES)]
        for part, data in enumerate(parts):
            self._tell(number, part=part, parts=len(parts), data=data)

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Call a function, and stop profiling if it fails, because observing a training must not end it."""
        try:
            work(*args)
        except Exception as error:
            activity.at_step = self._profiler = None
            self._tell(self._number, error=f"not profiled: {type(error).__name__}: {error}"[:1000])

    def _tell(self, number: int, part: int = 0, parts: int = 0, data: str = "", error: str | None = None) -> None:
        self._send(number=number, part=part, parts=parts, data=data, error=error)


def events_of(trace: dict[str, Any], rank: int, size: int, host: str, pid: int) -> list[dict[str, Any]]:
    """Return one rank's events for a trace of all ranks, with processes, numbers and times that do not collide.

    Args:
        trace: The trace that torch has exported.
        rank: The rank of the trace.
        size: Number of ranks.
        host: Host of the rank.
        pid: The process that was profiled. Other process ids in the trace are numbers of GPUs.

    Returns:
        Events with times in microseconds since 1970, without those of the profiler itself.
    """
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    numbers = {pid: _PROCESSES * rank}
    used = {event.get("pid") for event in trace["traceEvents"] if event["ph"] == "X"}  # without idle GPUs
    events = []
    for event in trace["traceEvents"]:
        source = event.get("pid")
        if not isinstance(source, int) or source not in used or "ts" not in event:
            continue
        number = numbers.setdefault(source, _PROCESSES * rank + len(numbers))
        result = {**event, "pid": number, "ts": round(event["ts"] + base, 3)}
        if "id" in event and isinstance(event["id"], int):
            result["id"] = event["id"] * size + rank
        if event["ph"] == "M":
            label = f"GPU {source}" if source != pid else "CPU"
            changed = {
                "process_name": {"name": f"rank {rank} ({host}): {label}"},
                "process_labels": {"labels": label},
                "process_sort_index": {"sort_index": number},
            }
            result["args"] = changed.get(event["name"], event.get("args"))
        events.append(result)
    return events
