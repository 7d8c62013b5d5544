"""``MlflowTracker``: a run of ours as a run of MLflow, logged from the driver, so that executors need no credentials."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.rates import grown, rates
from spark_hvd.runner.tracking import Facts

if TYPE_CHECKING:
    from spark_hvd.runner.summary import Summary
    from spark_hvd.vitals import Vitals

_log = logging.getLogger(__name__)
_SYSTEM_EVERY = 10.0
_RANKS_AT_ONCE = 64
"""With more ranks, each tells its system metrics less often: a server is to have the same work."""
_MOST_A_CALL = 1000  # MLflow's own limit
_MOST_WAITING = 50_000
_SEND_EVERY = 2.0
_PATIENCE = 15.0
"""Seconds that a run waits at its end for what the server has not taken yet."""
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)
_Value = tuple[str, float, int, int]
"""Name, value, milliseconds since the epoch, step."""


class MlflowTracker:
    """Logs to the tracking server that is set in this program (``mlflow.set_tracking_uri``).

    Into the active run of MLflow if there is one, which stays active, else into a new one that ends with ours:
    parameters; the metrics that rank 0 gives to ``hvd.progress``; for each rank ``system/rank_3/samples_per_second`` and
    the like, every ten seconds; the summary; how the run ended. See docs/tracking.md for the names.

    A thread of its own talks to the server: a slow one makes no training slower, and one that fails is a warning.

    Args:
        experiment: Name of the experiment for a new run; made if it does not exist. None for the one that is set.
        run_name: Of a new run; None for one that MLflow makes up.
        nested: Make a new run below the active one, instead of using that.
    """

    def __init__(self, experiment: str | None = None, run_name: str | None = None, *, nested: bool = False) -> None:
        try:
            import mlflow  # noqa: F401
        except ImportError as error:
            raise ImportError("MlflowTracker needs MLflow on the driver: pip install mlflow-skinny") from error
        self._experiment, self._run_name, self._nested = experiment, run_name, nested
        self.run_id: str | None = None
        """Of the run of MLflow; None before the first start."""
        self._ours = False
        self._outbox: _Outbox | None = None
        self._reset()

    def _reset(self) -> None:
        self._generation = -1
        self._began = time.time()
        self._steps = 0
        self._rank_0: Vitals | None = None
        self._before: dict[int, Vitals] = {}
        self._newest: dict[int, Vitals] = {}
        self._told: dict[int, float] = {}

    def start(self, facts: Facts) -> None:
        """See base class.

        Raises:
            mlflow.exceptions.MlflowException: the server does not answer, or refuses; nothing was started.
        """
        import mlflow

        active = mlflow.active_run()
        self._ours = active is None or self._nested
        if self._ours:
            active = mlflow.start_run(
                experiment_id=_experiment_id(self._experiment), run_name=self._run_name, nested=active is not None
            )
        assert active is not None
        self.run_id = active.info.run_id
        self._reset()
        self._outbox = _Outbox(self.run_id)
        self._outbox.put(params={f"spark_hvd.{name}": str(value) for name, value in facts.items()})

    def take(self, vitals: Vitals) -> None:
        """See base class."""
        if vitals.generation < self._generation:  # it was on its way when its world had ended
            return
        if vitals.generation > self._generation:
            self._generation = vitals.generation
            self._before, self._newest, self._told = {}, {}, {}
        now = time.time()
        if vitals.rank == 0:
            self._put(self._metrics(vitals, now))
        self._newest[vitals.rank] = vitals
        if vitals.rank not in self._before:
            self._before[vitals.rank], self._told[vitals.rank] = vitals, now
        elif now - self._told[vitals.rank] >= _SYSTEM_EVERY * max(1.0, vitals.size / _RANKS_AT_ONCE):
            self._put(self._system(vitals, now))

    def end(self, error: BaseException | None, summary: Summary | None) -> None:
        """See base class."""
        import mlflow

        outbox, self._outbox = self._outbox, None
        if outbox is None:
            return
        status = "FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        now = time.time()
        values = [value for vitals in self._newest.values() for value in self._system(vitals, now)]
        values += [(f"summary/{name}", value, int(1000 * now), self._steps) for name, value in _numbers(summary)]
        tags = {"spark_hvd.status": status}
        if error is not None:
            tags["spark_hvd.error"] = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        outbox.put(values, tags=tags)
        told = outbox.close(_PATIENCE)
        if not self._ours:
            return
        try:
            mlflow.end_run(status) if told else _forget()
        except Exception as own:
            outbox.complain(own)

    def _put(self, values: list[_Value]) -> None:
        if self._outbox is not None and values:
            self._outbox.put(values)

    def _metrics(self, vitals: Vitals, now: float) -> list[_Value]:
        """Rank 0's, if they are new."""
        before, self._rank_0 = self._rank_0, vitals
        if before is not None:
            # A process that is new begins at 0, and goes on with what the one before has done.
            self._steps += max(0, vitals.total_steps - before.total_steps)
            if (vitals.total_steps, vitals.stage, vitals.metrics) == (before.total_steps, before.stage, before.metrics):
                return []
        else:
            self._steps = vitals.total_steps
        stage = "" if vitals.stage in ("", "train") else f"{vitals.stage}/"
        found = {f"{stage}{name}": value for name, value in vitals.metrics.items()}
        if vitals.epoch is not None:
            found["epoch"] = vitals.epoch
        return [(name, value, int(1000 * now), self._steps) for name, value in found.items()]

    def _system(self, vitals: Vitals, now: float) -> list[_Value]:
        """What a rank has done since the last time; steps are seconds since the start, as in MLflow's own."""
        rank = vitals.rank
        found: dict[str, float | None] = {
            "memory_mb": vitals.memory_bytes / 1e6,
            "gpu_memory_mb": None if vitals.gpu_memory_bytes is None else vitals.gpu_memory_bytes / 1e6,
            "gpu_utilization": vitals.gpu_utilization,
        }
        done = rates(grown(self._before[rank], vitals))
        if done is not None:
            found |= {"cpu_cores": done.cpu, "steps_per_second": done.steps_per_second}
            found |= {"share_data": done.data, "share_communication": done.communication, "share_compute": done.compute}
            if vitals.samples:
                found["samples_per_second"] = done.samples_per_second
        self._before[rank], self._told[rank] = vitals, now
        at = round(now - self._began)
        return [
            (f"system/rank_{rank}/{name}", value, int(1000 * now), at)
            for name, value in found.items()
            if value is not None
        ]


class _Outbox:
    """What is on its way to the server; a thread sends it."""

    def __init__(self, run_id: str) -> None:
        from mlflow import MlflowClient, get_tracking_uri

        self._uri: str = get_tracking_uri()
        self._client = MlflowClient(self._uri)
        self._run_id = run_id
        self._values: list[_Value] = []
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="spark_hvd-mlflow", daemon=True)
        self._thread.start()

    def put(
        self, values: list[_Value] | None = None, params: dict[str, str] | None = None, tags: dict[str, str] | None = None
    ) -> None:
        """Take something along; the oldest values are dropped where too many wait."""
        with self._lock:
            self._values += values or []
            del self._values[:-_MOST_WAITING]
            self._params |= params or {}
            self._tags |= tags or {}

    def close(self, timeout: float) -> bool:
        """Send the rest; whether it was taken, or refused, in this time."""
        self._closing.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return True
        _log.warning(
            "MLflow at %s has not taken the last of run %s within %g s; its record is incomplete",
            self._uri,
            self._run_id,
            timeout,
        )
        return False

    def complain(self, error: Exception) -> None:
        """Log an error, if it is the first."""
        if not self._complained:
            self._complained = True
            _log.warning(
                "MLflow at %s: %s: %s; the record of run %s will be incomplete",
                self._uri,
                type(error).__name__,
                str(error).splitlines()[0] if str(error) else "",
                self._run_id,
            )

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(_SEND_EVERY)
            with self._lock:
                values, self._values = self._values, []
                params, self._params = self._params, {}
                tags, self._tags = self._tags, {}
            for batch in _batches(values, params, tags):
                try:
                    self._client.log_batch(self._run_id, **batch)
                except Exception as error:
                    self.complain(error)


def _batches(values: list[_Value], params: Mapping[str, str], tags: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Arguments of log_batch. Parameters go alone: one that has another value already makes all of a batch fail."""
    from mlflow.entities import Metric, Param, RunTag

    if params:
        yield {"params": [Param(_allowed(name), value) for name, value in params.items()]}
    for start in range(0, len(values), _MOST_A_CALL):
        some = values[start : start + _MOST_A_CALL]
        yield {"metrics": [Metric(_allowed(name), *rest) for name, *rest in some]}
    if tags:
        yield {"tags": [RunTag(_allowed(name), value) for name, value in tags.items()]}


def _allowed(name: str) -> str:
    """A name that MLflow takes."""
    return _NOT_ALLOWED.sub("_", name)[:250]


def _experiment_id(name: str | None) -> str | None:
    import mlflow

    if name is None:
        return None
    found = mlflow.get_experiment_by_name(name)
    return str(found.experiment_id if found else mlflow.create_experiment(name))


def _numbers(summary: Summary | None) -> Iterator[tuple[str, float]]:
    if is_dataclass(summary):
        for name, value in asdict(summary).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield name, value
