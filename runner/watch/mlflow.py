"""``MlflowTracker``: logs a run to MLflow from the driver, so that executors need no credentials."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from spark_hvd.runner.watch.cost import Cost
from spark_hvd.runner.watch.rates import goes_on, grown, rates
from spark_hvd.runner.watch.summary import Share, Summary
from spark_hvd.runner.watch.tracking import Facts, StopRun, Tracker, without_password

if TYPE_CHECKING:
    from spark_hvd.world.vitals import Vitals

_log = logging.getLogger(__name__)
_MAX_PER_CALL = 1000  # MLflow's own limit
_MOST_WAITING = 50_000
_SEND_EVERY = 2.0
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)
Value = tuple[str, float, int, int]
"""Name, value, milliseconds since the epoch, step."""


class Outbox:
    """Sends values to MLflow's server in its own thread, so that nothing else waits for the server."""

    def __init__(self, run_id: str) -> None:
        from mlflow import MlflowClient, get_tracking_uri

        uri: str = get_tracking_uri()
        self._client = MlflowClient(uri)
        self._server = without_password(uri)
        self._run_id = run_id
        self._values: list[Value] = []
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._complained = False
        self._status: str | None = None
        self._thread = threading.Thread(target=self._run, name="spark_hvd-mlflow", daemon=True)
        self._thread.start()

    def put(
        self,
        values: list[Value] | None = None,
        params: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        """Queue values for sending; if too many wait, the oldest are dropped."""
        with self._lock:
            self._values += values or []
            del self._values[:-_MOST_WAITING]
            self._params |= params or {}
            self._tags |= tags or {}

    def close(self, status: str | None, timeout: float) -> None:
        """Send the rest, and wait at most ``timeout`` seconds until it is accepted or refused.

        Without a status, the MLflow run is not ended.
        """
        self._status = status
        self._closing.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning(
                "MLflow at %s has not taken the last of run %s within %g s; its record is incomplete",
                self._server,
                self._run_id,
                timeout,
            )

    def _try(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(self._run_id, *args, **kwargs)
        except Exception as error:
            if self._complained:
                return
            self._complained = True
            _log.warning(
                "MLflow at %s: %s: %s; the record of run %s will be incomplete",
                self._server,
                type(error).__name__,
                without_password((str(error).splitlines() or [""])[0]),
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
                self._try(self._client.log_batch, **batch)
        if self._status is not None:
            self._try(self._client.set_terminated, self._status)


def _batches(values: list[Value], params: Mapping[str, str], tags: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield arguments for log_batch. Parameters go alone: one that already has another value fails the whole batch."""
    from mlflow.entities import Metric, Param, RunTag

    if params:
        yield {"params": [Param(allowed(name), value) for name, value in params.items()]}
    for start in range(0, len(values), _MAX_PER_CALL):
        some = values[start : start + _MAX_PER_CALL]
        yield {"metrics": [Metric(allowed(name), value, at, step) for name, value, at, step in some]}
    if tags:
        yield {"tags": [RunTag(allowed(name), value) for name, value in tags.items()]}


def allowed(name: str) -> str:
    """Replace the characters of a name that MLflow does not accept."""
    return _NOT_ALLOWED.sub("_", name)[:250]


_SYSTEM_EVERY = 10.0
_RANKS_AT_ONCE = 64
"""With more ranks, each logs its system metrics less often, so that the server's work stays the same."""
_FIT = "fit."
"""Prefix of the facts of an estimator's fit."""
_PATIENCE = 15.0
"""Seconds that a run waits at its end for the server to take the remaining values."""


class MlflowTracker(Tracker):
    """Logs to the tracking server that is set in this program (``mlflow.set_tracking_uri``).

    It logs into the active MLflow run, which stays active, or into a new one that ends with this run. It logs
    parameters; the metrics that rank 0 gives to ``hvd.progress``; every ten seconds
    ``system/rank_3/samples_per_second`` and similar metrics for each rank; the summary; and how the run ended.
    docs/tracking.md lists all names.

    A separate thread talks to the server, so a slow server does not slow down training. If the server fails, the
    tracker logs a warning.

    Args:
        experiment: Name of the experiment for a new run, created if it does not exist. None for the current one.
        run_name: Name of a new run; None for a name chosen by MLflow.
        nested: Create a new run below the active one instead of using the active one.
        checkpoints: For the fit of an estimator: after the training, also log the checkpoint of each epoch as a model
            (a LoggedModel "checkpoint-3" with the metrics of epoch 3).
        registered_model_name: Register the best of these checkpoints under this name, as a new version.

    Raises:
        ImportError: MLflow is not installed.
        ValueError: ``registered_model_name`` without ``checkpoints``.
    """

    __module__ = "spark_hvd.runner"

    def __init__(
        self,
        experiment: str | None = None,
        run_name: str | None = None,
        *,
        nested: bool = False,
        checkpoints: bool = False,
        registered_model_name: str | None = None,
    ) -> None:
        if registered_model_name is not None and not checkpoints:
            raise ValueError(
                f"registered_model_name={registered_model_name!r} without checkpoints=True: it registers the best "
                "checkpoint. Give both, or register the trained model with log_to_mlflow(df, registered_model_name=...)"
            )
        try:
            import mlflow  # noqa: F401
        except ImportError as error:
            raise ImportError("MlflowTracker needs MLflow on the driver: pip install mlflow-skinny") from error
        self._experiment, self._run_name, self._nested = experiment, run_name, nested
        self.checkpoints, self.registered_model_name = checkpoints, registered_model_name
        self.run_id: str | None = None
        """The ID of the MLflow run; None before the first start."""
        self._ours = self._fits = False
        self._outbox: Outbox | None = None
        self._reset()

    def _reset(self) -> None:
        self._generation = -1
        self._epochs_logged: set[tuple[float, str]] = set()
        self._began = time.time()
        self._steps = 0
        self._rank_0: Vitals | None = None
        self._before: dict[int, Vitals] = {}
        self._newest: dict[int, Vitals] = {}
        self._logged_at: dict[int, float] = {}

    def start(self, facts: Facts) -> None:
        """See base class.

        Raises:
            ValueError: ``checkpoints`` in a run that is not the fit of an estimator.
            mlflow.exceptions.MlflowException: the server does not answer, or refuses. No rank was started.
        """
        import mlflow

        self._fits = any(name.startswith(_FIT) for name in facts)
        if self.checkpoints and not self._fits:
            raise ValueError(
                "MlflowTracker(checkpoints=True) is for the fit of an estimator; in a function of your own, log models "
                "on rank 0 (mlflow.pytorch.log_model), and leave checkpoints out"
            )

        active = mlflow.active_run()
        known: str | None
        known = active.info.run_id if active is not None else os.environ.get("MLFLOW_RUN_ID")  # set by `mlflow run`
        self._ours = known is None or self._nested
        self.run_id = run_id = known if known is not None and not self._nested else self._new_run(known)
        self._reset()
        self._outbox = Outbox(run_id)
        self._outbox.put(params={_param(name): str(value) for name, value in facts.items()})

    def take(self, vitals: Vitals) -> None:
        if vitals.generation < self._generation:  # the record arrived after the end of its world
            return
        if vitals.generation > self._generation:
            self._generation = vitals.generation
            self._before, self._newest, self._logged_at = {}, {}, {}
        now = time.time()
        if vitals.rank == 0:
            self._put(self._epochs(vitals, now) if self._fits else self._metrics(vitals, now))
        self._newest[vitals.rank] = vitals
        if vitals.rank not in self._before:
            self._before[vitals.rank], self._logged_at[vitals.rank] = vitals, now
        elif now - self._logged_at[vitals.rank] >= _SYSTEM_EVERY * max(1.0, vitals.size / _RANKS_AT_ONCE):
            self._put(self._system(vitals, now))

    def end(self, error: BaseException | None, summary: Summary | None) -> None:
        outbox, self._outbox = self._outbox, None
        if outbox is None:
            return
        killed = isinstance(error, KeyboardInterrupt | StopRun)
        status = "FINISHED" if error is None else "KILLED" if killed else "FAILED"
        now = time.time()
        values = [value for vitals in self._newest.values() for value in self._system(vitals, now)]
        values += [(f"summary/{name}", value, int(1000 * now), self._steps) for name, value in _numbers(summary)]
        tags = {"spark_hvd.status": status}
        if error is not None:
            tags["spark_hvd.error"] = without_password(f"{type(error).__name__}: {error}".splitlines()[0])[:500]
        outbox.put(values, tags=tags)
        outbox.close(status if self._ours else None, _PATIENCE)

    def _new_run(self, parent: str | None) -> str:
        """Create a run with the client, because the end of ``mlflow.start_run`` would wait for the server."""
        from mlflow import MlflowClient
        from mlflow.tracking.context.registry import resolve_tags
        from mlflow.tracking.fluent import _get_experiment_id

        client = MlflowClient()
        tags = resolve_tags()  # the user, the program
        if parent is not None:
            tags["mlflow.parentRunId"] = parent
        experiment: Any  # None according to mlflow's types
        if self._experiment is not None:
            found = client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found else client.create_experiment(self._experiment)
        else:
            experiment = client.get_run(parent).info.experiment_id if parent else _get_experiment_id()
        return str(client.create_run(experiment, tags=tags, run_name=self._run_name).info.run_id)

    def _put(self, values: list[Value]) -> None:
        if self._outbox is not None and values:
            self._outbox.put(values)

    def _epochs(self, vitals: Vitals, now: float) -> list[Value]:
        """Return the means of new epochs, one point each, as MLflow's own logging of Keras and Lightning does."""
        self._metrics(vitals, now)  # called to count the steps
        rows = [(row["epoch"], name, value) for row in vitals.epochs_done for name, value in row.items()]
        # Log each metric of an epoch once, even if the epoch is repeated, and metrics that arrive late when they do.
        new = [each for each in rows if each[1] != "epoch" and each[:2] not in self._epochs_logged]
        self._epochs_logged |= {each[:2] for each in new}
        return [(name, value, int(1000 * now), int(epoch)) for epoch, name, value in new]

    def _metrics(self, vitals: Vitals, now: float) -> list[Value]:
        """Return rank 0's metrics if they are new."""
        before, self._rank_0 = self._rank_0, vitals
        if before is not None and before.process == vitals.process:
            self._steps += vitals.total_steps - before.total_steps
            if (vitals.total_steps, vitals.stage, vitals.metrics) == (before.total_steps, before.stage, before.metrics):
                return []
        else:  # a new process counts from 0 and continues the work of the previous one
            self._steps += vitals.total_steps
        stage = "" if vitals.stage in ("", "train") else f"{vitals.stage}/"
        found = {f"{stage}{name}": value for name, value in vitals.metrics.items()}
        if vitals.epoch is not None:
            found["epoch"] = vitals.epoch
        return [(name, value, int(1000 * now), self._steps) for name, value in found.items()]

    def _system(self, vitals: Vitals, now: float) -> list[Value]:
        """Return a rank's rates since the last call; the step is in seconds since the start, as in MLflow's own."""
        rank = vitals.rank
        found: dict[str, float | None] = {
            "memory_mb": vitals.memory_bytes / 1e6,
            "gpu_memory_mb": None if vitals.gpu_memory_bytes is None else vitals.gpu_memory_bytes / 1e6,
            "gpu_utilization": vitals.gpu_utilization,
        }
        before = self._before[rank]
        done = rates(grown(before, vitals)) if goes_on(before, vitals) else None
        if done is not None:
            found |= {"cpu_cores": done.cpu, "steps_per_second": done.steps_per_second}
            found |= {"share_data": done.data, "share_communication": done.communication, "share_compute": done.compute}
            if vitals.samples:
                found["samples_per_second"] = done.samples_per_second
        self._before[rank], self._logged_at[rank] = vitals, now
        at = round(now - self._began)
        return [
            (f"system/rank_{rank}/{name}", value, int(1000 * now), at)
            for name, value in found.items()
            if value is not None
        ]


def _param(name: str) -> str:
    """Return the name of a fact in MLflow; facts of a fit have the names of MLflow's own logging."""
    return name.removeprefix(_FIT) if name.startswith(_FIT) else f"spark_hvd.{name}"


def _numbers(summary: Summary | None) -> Iterator[tuple[str, float]]:
    if summary is not None:
        for field in fields(summary):
            value = getattr(summary, field.name)
            if isinstance(value, Share):
                yield field.name, value.mean
            elif isinstance(value, Cost):
                taken = {"rank_seconds": value.rank_seconds, "gpu_seconds": value.gpu_seconds, "price": value.price}
                yield from ((name, number) for name, number in taken.items() if number)
            elif isinstance(value, (int, float)):
                yield field.name, value
