"""Callbacks observe, log and stop a training.

They are pickled with the estimator, and each rank runs its own copies; ``state.rank`` tells which rank. Guard anything
that must happen once with ``if state.rank == 0``. An exception in a callback fails the fit.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_hvd.estimators.training.history import History, monitored
from spark_hvd.scratch import Scratch

if TYPE_CHECKING:
    import torch

    from spark_hvd.store import Store


@dataclass(slots=True)
class TrainState:
    """The state of a training, for callbacks.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        epoch: Number of the epoch, from 0.
        epochs: Total number of epochs.
        step: Batches done in this epoch.
        steps: Batches in this epoch, the same on every rank.
        global_step: Batches done since the first epoch, including those of a resumed run.
        model: The model, on its device.
        optimizer: The optimizer, with gradients averaged over ranks.
        loss: Loss of this rank's last batch, shape (), on the model's device.
        history: Rows of the finished epochs; in ``on_epoch_end`` the last row is this epoch's.
        store: The store of the run.
        run_id: The name of the run.
        stop: Set it on any rank to end training on all ranks after this epoch.
        stop_reason: Text to print then.
        validation_in_background: Whether rows get their validation later, during other epochs.
    """

    __module__ = "spark_hvd.estimators"

    rank: int
    size: int
    epochs: int
    steps: int
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    store: Store
    run_id: str
    epoch: int = 0
    step: int = 0
    global_step: int = 0
    loss: torch.Tensor | None = None
    history: History = field(default_factory=History)
    stop: bool = False
    stop_reason: str = ""
    validation_in_background: bool = False


class Callback:
    """Base class of callbacks; override the methods you need."""

    __module__ = "spark_hvd.estimators"

    def on_train_begin(self, state: TrainState) -> None:
        """Called once, when all ranks have the same initial weights."""

    def on_epoch_begin(self, state: TrainState) -> None:
        """Called before the first batch of an epoch."""

    def on_batch_end(self, state: TrainState) -> None:
        """Called after each batch; ``state.loss`` is its loss. Reading its value waits for a GPU."""

    def on_epoch_end(self, state: TrainState) -> None:
        """Called after validation; ``state.history[-1]`` is the epoch's row, the same on all ranks.

        With ``validation_in_background``, rows of earlier epochs may have received their validation since the last
        call. The last results may arrive only before ``on_train_end``.
        """

    def on_train_end(self, state: TrainState) -> None:
        """Called once after the last epoch, even if training was stopped early, but not after an error."""


class EarlyStopping(Callback):
    """Stops when a value has not improved for some epochs.

    With ``validation_in_background``, it uses the results known so far; epochs that were not validated do not count.

    Args:
        monitor: A key of the history, such as "val_loss", "loss" or a metric; None for ``val_loss`` if there is one.
        patience: Number of epochs to wait for an improvement.
        min_delta: Minimum change that counts as an improvement.
        mode: Whether "min" or "max" is better.
    """

    __module__ = "spark_hvd.estimators"

    def __init__(
        self, monitor: str | None = None, patience: int = 3, min_delta: float = 0.0, mode: str = "min"
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience={patience}: expected at least 1 epoch")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}: expected 'min' or 'max'")
        self.monitor, self.patience, self.min_delta, self.mode = monitor, patience, min_delta, mode

    def on_epoch_end(self, state: TrainState) -> None:
        """See base class. Uses the whole history, so a resumed run stops where an uninterrupted one would."""
        monitor = monitored(state.history[-1], self.monitor, in_background=state.validation_in_background)
        sign = 1.0 if self.mode == "min" else -1.0
        best, waited = float("inf"), 0
        known = [row for row in state.history if monitor in row]
        for row in known:
            value = sign * row[monitor]
            if value < best - self.min_delta:
                best, waited = value, 0
            else:
                waited += 1
        if waited >= self.patience:
            state.stop = True
            if known[-1] is not state.history[-1]:
                state.stop_reason = (
                    f"stopped after epoch {state.epoch + 1}, by the {monitor} of epoch {known[-1]['epoch']}"
                )


class CSVLogger(Callback):
    """Writes the history as ``logs/history.csv`` of the run, after every epoch."""

    __module__ = "spark_hvd.estimators"

    def on_epoch_end(self, state: TrainState) -> None:
        if state.rank == 0:
            keys = list(dict.fromkeys(key for row in state.history for key in row))
            text = io.StringIO()
            writer = csv.DictWriter(text, keys)
            writer.writeheader()
            writer.writerows(state.history)
            path = f"{state.store.logs_path(state.run_id)}/history.csv"
            state.store.write_bytes(path, text.getvalue().encode())

    def on_train_end(self, state: TrainState) -> None:
        if state.validation_in_background:  # the last results have come since the last epoch's end
            self.on_epoch_end(state)


class TensorBoard(Callback):
    """Writes losses, metrics and the learning rate for TensorBoard into ``logs/`` of the run; needs tensorboard.

    View them with ``tensorboard --logdir <store>/runs``. If the store is not a local directory, the event file is
    written locally and copied after every epoch.
    """

    __module__ = "spark_hvd.estimators"

    def __init__(self) -> None:
        self._entries = _NewEntries()
        self._writer: Any = None
        self._folder: Scratch | None = None

    def on_train_begin(self, state: TrainState) -> None:
        if state.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self._entries.skip(state.history)
            self._folder = Scratch("tensorboard")
            self._writer = SummaryWriter(self._folder.path)

    def on_epoch_end(self, state: TrainState) -> None:
        if self._writer is not None:
            for epoch, key, value in self._entries.of(state.history):
                name = f"validation/{key.removeprefix('val_')}" if key.startswith("val_") else f"train/{key}"
                self._writer.add_scalar(name, value, epoch)
            self._writer.flush()
            self._copy(state)

    def on_train_end(self, state: TrainState) -> None:
        if state.validation_in_background:
            self.on_epoch_end(state)
        if self._writer is not None and self._folder is not None:
            self._writer.close()
            self._copy(state)
            self._folder.close()
            self._writer = self._folder = None

    def _copy(self, state: TrainState) -> None:
        assert self._folder is not None
        for name in os.listdir(self._folder.path):
            with open(os.path.join(self._folder.path, name), "rb") as file:
                state.store.write_bytes(f"{state.store.logs_path(state.run_id)}/{name}", file.read())


class MLflow(Callback):
    """Logs the history of the run to MLflow, step by epoch; needs mlflow where rank 0 runs.

    It uses the tracking URI, the active run if there is one, and the current experiment of the driver, where the
    callback is made.

    Args:
        run_name: Name of the MLflow run, if none is active; None for the run's id.
    """

    __module__ = "spark_hvd.estimators"

    def __init__(self, run_name: str | None = None) -> None:
        import mlflow

        active = mlflow.active_run()
        self._uri: str = mlflow.get_tracking_uri()
        self._run: str = active.info.run_id if active else ""
        self._creates_run = active is None
        self._run_name = run_name
        self._entries = _NewEntries()
        self._experiment_id = "" if active else _experiment_id(mlflow)

    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self._uri)

    def on_train_begin(self, state: TrainState) -> None:
        if state.rank == 0:
            if not self._run:
                run = self._client().create_run(self._experiment_id, run_name=self._run_name or state.run_id)
                self._run = run.info.run_id
            self._client().log_param(self._run, "num_proc", state.size)
            self._entries.skip(state.history)

    def on_epoch_end(self, state: TrainState) -> None:
        if state.rank == 0:
            for epoch, key, value in self._entries.of(state.history):
                self._client().log_metric(self._run, key, value, step=epoch)

    def on_train_end(self, state: TrainState) -> None:
        if state.validation_in_background:
            self.on_epoch_end(state)
        if state.rank == 0 and self._creates_run:
            self._client().set_terminated(self._run)


class _NewEntries:
    """Finds new entries of a history: those of the epoch that has ended, and delayed values of earlier ones."""

    def __init__(self) -> None:
        self._reported: set[tuple[int, str]] = set()

    def skip(self, history: History) -> None:
        """Mark this history as already reported."""
        list(self.of(history))

    def of(self, history: History) -> Iterator[tuple[int, str, float]]:
        """Yield epoch, key and value of each new entry, in the order of epochs."""
        for row in history:
            for key in row.keys() - {"epoch"}:
                if (entry := (row["epoch"], key)) not in self._reported:
                    self._reported.add(entry)
                    yield row["epoch"], key, row[key]


def _experiment_id(mlflow: Any) -> str:
    """Return the id of the experiment set by ``mlflow.set_experiment`` or the environment, or of the default one."""
    from mlflow.tracking.fluent import _get_experiment_id

    return str(_get_experiment_id())
