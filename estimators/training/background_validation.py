"""Validation in the background: the files by which ranks and driver communicate in the folder of the run.

Rank 0 writes the newest checkpoint as a request. The driver starts a separate run that validates it, and writes the
results. At the end, rank 0 requests the end, and the driver announces that no validation is running.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import spark_hvd.torch as hvd
from spark_hvd.checkpoint.format import on_rank_0
from spark_hvd.estimators.training.checkpoint import Checkpoints
from spark_hvd.estimators.training.history import History, Row
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError

_RESULTS, _LAST = "validated.json", "validate.end"
_NAME = re.compile(r"validate-(\d+)-(\d+)\.ckpt")
_POLL_SECONDS, _NOTICE_SECONDS = 0.2, 5.0
_PATIENCE = 60.0
"""Seconds for which ranks tolerate that they cannot read the results in the store."""
HEARTBEAT_SECONDS, _SILENT = 60.0, 600.0
"""Seconds after which the driver writes its results again, and after which ranks stop waiting for it."""


class ValidationRequest(NamedTuple):
    """A request to validate a checkpoint: the generation of the ranks that wrote it, and its epoch, from 1."""

    generation: int
    epoch: int

    @property
    def name(self) -> str:
        """The name of the checkpoint."""
        return f"validate-{self.generation}-{self.epoch}.ckpt"

    @classmethod
    def of(cls, name: str) -> ValidationRequest | None:
        """Return the request whose checkpoint has this name; None if it is another kind of file."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(*map(int, found.groups()))


@dataclass
class Results:
    """The results of validations.

    Attributes:
        epochs: Losses and metrics of each epoch, by its number, with the generation that trained it. For an epoch that
            was trained again, they are those of the last time. A failed validation has an empty entry.
        ended: Whether no more results will come.
        at: Time when these results were written, by the driver's clock.
    """

    epochs: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict)
    ended: bool = False
    at: float = field(default=0.0, compare=False)

    def add(self, request: ValidationRequest, means: Mapping[str, float]) -> None:
        """Add the result of a validation."""
        self.epochs[request.epoch] = request.generation, dict(means)

    def of(self, history: History) -> dict[int, dict[str, float]]:
        """Return the results for the rows of a history, by epoch, in order.

        If an epoch was trained again after a loss, results for its earlier weights are omitted.
        """
        rows = {int(row["epoch"]): generation_of(row) for row in history}
        return {epoch: means for epoch, (theirs, means) in sorted(self.epochs.items()) if rows.get(epoch) == theirs}

    def best(self, key: str, sign: float, history: History) -> float | None:
        """Return the lowest ``sign`` times the value of ``key`` in the rows of a history; None if all are NaN."""
        values = [sign * means[key] for means in self.of(history).values() if key in means]
        return min((value for value in values if not math.isnan(value)), default=None)


def generation_of(row: Row) -> int:
    """Return the generation that trained the epoch of a row."""
    return int(row.get("restarts", 0))


@dataclass(frozen=True)
class ValidationFolder:
    """The files of background validation in the folder of a run; errors are those of the store."""

    store: Store
    run_id: str
    fit: str | None = None

    @property
    def owner(self) -> Checkpoints:
        """The run's checkpoints, whose owner alone may write here."""
        return Checkpoints(self.store, self.run_id, self.fit)

    def waiting(self) -> list[ValidationRequest]:
        """Return the waiting requests, the oldest first."""
        names = (path.rpartition("/")[2] for path in self.store.list(self.store.run_path(self.run_id)))
        return sorted(request for name in names if (request := ValidationRequest.of(name)) is not None)

    def results(self) -> Results:
        """Return the driver's results; empty before the first."""
        path = self._path(_RESULTS)
        if not self.store.exists(path):
            return Results()
        content: dict[str, Any] = json.loads(self.store.read_bytes(path))
        epochs = {int(epoch): (each[0], each[1]) for epoch, each in content["epochs"].items()}
        return Results(epochs, content["ended"], content["at"])

    def publish(self, results: Results) -> None:
        """Write results for the ranks."""
        content = json.dumps({"epochs": results.epochs, "ended": results.ended, "at": time.time()})
        self.store.write_bytes(self._path(_RESULTS), content.encode())

    def request_end(self) -> None:
        """Request that the driver begin no further validation."""
        self.store.write_bytes(self._path(_LAST), b"")

    @property
    def end_requested(self) -> bool:
        """Whether ranks have requested the end."""
        return self.store.exists(self._path(_LAST))

    def clear(self, *, results: bool) -> None:
        """Delete the files; also ``results``, if they are in the history."""
        names = [request.name for request in self.waiting()]
        for name in (*names, _LAST, *([_RESULTS] if results else ())):
            if self.store.exists(self._path(name)):
                self.store.delete(self._path(name))

    def _path(self, name: str) -> str:
        return self.store.checkpoint_path(self.run_id, name)


class ValidationClient:
    """A rank's side of validation in the background. All ranks make the same calls, so their histories stay equal.

    If ``verbose`` is set, rank 0 prints what it waits for.
    """

    def __init__(self, folder: ValidationFolder, verbose: bool) -> None:
        self._folder, self._verbose = folder, verbose
        self._failing_since: float | None = None
        self._last_written: tuple[float, float] | None = None
        """When the driver last wrote, by its clock, and when this rank first saw it, by its own."""

    def begin(self) -> None:
        """Delete what an earlier fit of the run has left, on rank 0."""
        self._folder.clear(results=True)

    def request(self, epoch: int) -> ValidationRequest:
        """Return the request of the checkpoint after an epoch, from 1."""
        return ValidationRequest(hvd.generation(), epoch)

    def superseded(self, request: ValidationRequest) -> list[str]:
        """Return the names of the checkpoints that need no validation once this one exists."""
        return [each.name for each in self._folder.waiting() if each != request]

    def end(self) -> None:
        """Request the end: the ranks validate the rest themselves."""
        if hvd.rank() == 0:
            self._folder.request_end()

    def collect(self, history: History, *, wait: bool) -> Iterator[Row]:
        """Yield each new result once, as a row, in the order of epochs.

        With ``wait``, wait for a running validation.
        """
        began = time.monotonic()
        is_quiet = not self._verbose or hvd.rank() != 0
        while True:
            results = on_rank_0(self._results, name="spark_hvd.validation")
            for epoch, means in results.of(history).items():
                row = next(row for row in history if row["epoch"] == epoch)
                if means.keys() - row.keys():
                    row.update(means)
                    yield {"epoch": epoch, **means}
            if not wait or results.ended:
                return
            if not is_quiet and time.monotonic() - began > _NOTICE_SECONDS:
                is_quiet = True
                print("the last epoch is done; waiting for the validation in the background to end", flush=True)
            time.sleep(_POLL_SECONDS)

    def _results(self) -> Results:
        try:
            results = self._folder.results()
            self._folder.owner.check_owner()  # its driver no longer writes for a fit that another one has replaced
        except StoreError:  # as on HDFS while the driver replaces the file, which is empty for a moment
            if self._failing_since is None:
                self._failing_since = time.monotonic()
            if time.monotonic() - self._failing_since > _PATIENCE:
                raise
            return Results()
        self._failing_since = None
        now = time.monotonic()
        if self._last_written is None or results.at != self._last_written[0]:
            self._last_written = results.at, now
        elif now - self._last_written[1] > _SILENT:
            print(
                f"the driver has reported nothing about validation in the background for {_SILENT:g} s. Perhaps it "
                "cannot reach the store. Ranks no longer wait for it",
                flush=True,
            )
            results.ended = True
        return results
