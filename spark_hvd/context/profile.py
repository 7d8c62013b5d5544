"""The next steps of this rank by torch's profiler, for somebody who watches; a step that nobody asks about pays a look.

The profiler has to start and stop on the thread that trains, so it does at the ends of steps. What it has found is read
and packed by a thread of its own: ``traceEvents`` of Chrome's format with the numbers of this rank, compressed, so that
whoever has those of all ranks only puts them behind each other. Times are those of the host's clock.
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

from spark_hvd.context.standing import standing
from spark_hvd.scratch import Scratch, local_directory
from spark_hvd.transport.torch_private import is_profiling
from spark_hvd.world.activity import activity

_PART = 512 << 10
_MOST_BYTES = 64 << 20
_LAST_SECONDS = 10.0
"""How long the end of a function waits for the trace of its last steps to be sent."""
_PROCESSES = 1000
"""Numbers that each rank has for its process and its GPUs."""


class StepProfiler:
    """Profiles steps when it is asked; one request at a time.

    ``tell`` sends what there is to say, as fields: the ``number`` of the request; ``parts``, of which there are as many
    (0: it was heard), this one's place ``part`` and base64 ``data``; or an ``error``. It is called from any thread.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        self._send = tell
        self._number = self._left = 0
        self._profiler: Any = None
        self._span: Any = None
        self._on: int | None = None
        self._packing: threading.Thread | None = None

    def ask(self, number: int, steps: int) -> None:
        """Profile so many steps, from the end of the one under way; from any thread."""
        if activity.at_step is not None or (self._packing is not None and self._packing.is_alive()):
            self._tell(number, error="it is still busy with a profile that was asked for before")
            return
        self._number, self._left = number, steps
        self._tell(number)
        activity.at_step = self._turn

    def end(self) -> None:
        """No step will follow; on the thread that trains. What was profiled so far is sent."""
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
        """Begin the span of a step, and end that of the previous one."""
        self._unmark()
        self._span = torch.profiler.record_function("step")
        self._span.__enter__()

    def _unmark(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        if is_profiling():  # torch would take that one's place without a word
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
        activity.at_step = self._profiler = None  # last: from now on somebody else may ask

    def _pack(self, profiler: Any, number: int) -> None:
        here = standing.context
        rank, size, host = (0, 1, "") if here is None else (here.world.me.rank, here.world.me.size, here.world.me.host)
        with Scratch("profile", local_directory(os.environ)) as folder:
            path = os.path.join(folder, "trace.json")
            profiler.export_chrome_trace(path)
            with open(path, encoding="utf-8") as file:
                trace = json.load(file)
        text = ",\n".join(json.dumps(each) for each in events_of(trace, rank, size, host, os.getpid()))
        packed = base64.b64encode(gzip.compress(text.encode(), 6)).decode()
        if len(packed) > _MOST_BYTES:
            self._tell(number, error=f"its trace has {len(packed) >> 20} MiB: ask for fewer steps")
            return
        parts = [packed[start : start + _PART] for start in range(0, len(packed), _PART)]
        for part, data in enumerate(parts):
            self._tell(number, part=part, parts=len(parts), data=data)

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Call a function, and stop profiling if it fails: what observes a training must not end it."""
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
        trace: What torch has exported.
        rank: The rank whose trace this is.
        size: Ranks in all.
        host: Where it ran.
        pid: The process that was profiled; other numbers of processes are those of its GPUs.

    Returns:
        Events with times in microseconds since 1970, without those that tell of the profiler itself.
    """
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    numbers = {pid: _PROCESSES * rank}
    used = {event.get("pid") for event in trace["traceEvents"] if event["ph"] == "X"}  # of a host's GPUs
    found = []
    for event in trace["traceEvents"]:
        told = event.get("pid")
        if not isinstance(told, int) or told not in used or "ts" not in event:
            continue
        number = numbers.setdefault(told, _PROCESSES * rank + len(numbers))
        made = {**event, "pid": number, "ts": round(event["ts"] + base, 3)}
        if "id" in event and isinstance(event["id"], int):
            made["id"] = event["id"] * size + rank
        if event["ph"] == "M":
            what = f"GPU {told}" if told != pid else "CPU"
            changed = {
                "process_name": {"name": f"rank {rank} ({host}): {what}"},
                "process_labels": {"labels": what},
                "process_sort_index": {"sort_index": number},
            }
            made["args"] = changed.get(event["name"], event.get("args"))
        found.append(made)
    return found
