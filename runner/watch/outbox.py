"""Sends values to MLflow's server in a thread of its own, so that nothing else waits for the server."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spark_hvd.runner.watch.tracking import without_password

_log = logging.getLogger(__name__)
_MOST_A_CALL = 1000  # MLflow's own limit
_MOST_WAITING = 50_000
_SEND_EVERY = 2.0
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)
Value = tuple[str, float, int, int]
"""Name, value, milliseconds since the epoch, step."""


class Outbox:
    """See the module's description.

    Args:
        run_id: Of the run of MLflow.
    """

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
        """Queue values to be sent; the oldest are dropped when too many wait."""
        with self._lock:
            self._values += values or []
            del self._values[:-_MOST_WAITING]
            self._params |= params or {}
            self._tags |= tags or {}

    def close(self, status: str | None, timeout: float) -> None:
        """Send the rest, and wait until it is taken or refused.

        Args:
            status: What the run has ended with; None if it is not ours to end.
            timeout: Seconds to wait at most.
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
    """Arguments of log_batch. Parameters go alone: one that has another value already makes all of a batch fail."""
    from mlflow.entities import Metric, Param, RunTag

    if params:
        yield {"params": [Param(_allowed(name), value) for name, value in params.items()]}
    for start in range(0, len(values), _MOST_A_CALL):
        some = values[start : start + _MOST_A_CALL]
        yield {"metrics": [Metric(_allowed(name), value, at, step) for name, value, at, step in some]}
    if tags:
        yield {"tags": [RunTag(_allowed(name), value) for name, value in tags.items()]}


def _allowed(name: str) -> str:
    """The name with characters that MLflow accepts."""
    return _NOT_ALLOWED.sub("_", name)[:250]
