"""Callbacks for ``model.fit``, with Horovod's names: ``hvd.callbacks``."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import keras

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.context.progress import Progress, progress
from spark_hvd.keras.backend import broadcast_variables
from spark_hvd.keras.optimizer import OUTSIDE, DistributedKerasOptimizer
from spark_hvd.keras.rates import LearningRateScheduleCallback, LearningRateWarmupCallback

_log = logging.getLogger("spark_hvd")


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Start alike: the weights of the model and the variables of its optimizer are those of one rank.

    They are overwritten at the start of training, before the first batch.

    Args:
        root_rank: Whose values everyone gets.
        device: Accepted for Horovod's sake; not needed.
        local_variables: Variables that stay each rank's own, a list, of the model or its optimizer.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {id(variable) for variable in local_variables or ()}

    def set_model(self, model: Any) -> None:
        """See keras.callbacks.Callback."""
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", None)
        if isinstance(inner, DistributedKerasOptimizer):
            raise ValueError(OUTSIDE)
        # That of compile, or those of a train_step of the user's own.
        if model.jit_compile and any(isinstance(each, DistributedKerasOptimizer) for each in vars(model).values()):
            _log.warning("jit_compile of model %r is switched off: what ranks exchange cannot be compiled", model.name)
            model.jit_compile = False

    def on_train_begin(self, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [*self.model.weights, *([] if optimizer is None else optimizer.variables)]
        broadcast_variables([each for each in variables if id(each) not in self._local], self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Make the metrics of each epoch the mean over all ranks, for the callbacks after this one and for the history.

    Ranks count alike; a metric that some ranks lack is the mean of the others.

    Args:
        device: Accepted for Horovod's sake; not needed.
        process_set: The ranks to average over.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        if logs is None:
            return
        mine = {name: float(value) for name, value in logs.items()}
        ranks = allgather_object(mine, name="spark_hvd.keras.metrics", process_set=self.process_set)
        for name in {name for metrics in ranks for name in metrics}:
            values = [metrics[name] for metrics in ranks if name in metrics]
            logs[name] = sum(values) / len(values)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc] # Any
    """Keras' ModelCheckpoint of the best model so far, by a metric.

    Args:
        filepath: Where to save it. None: an estimator says where; with `fit` of Keras give one, on rank 0 alone.
        monitor: The metric, as in the logs of an epoch.
        verbose: 1: say when one is saved.
        save_weights_only: Save the weights and not the model.
        mode: "min", "max" or "auto", after the metric's name.
        save_freq: "epoch", or a number of batches.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str | None = None,
    ) -> None:
        # Keras looks at the name's ending at once, and it has to have a name.
        placeholder = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath if filepath is not None else f"best{placeholder}",
            monitor,
            verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self._placed = filepath is not None

    def on_train_begin(self, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        if not self._placed:
            raise ValueError("BestModelCheckpoint was made without filepath=, so nobody knows where to save the model.")
        super().on_train_begin(logs)


class ProgressCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Show the driver how far `fit` is, with its loss and metrics: :func:`spark_hvd.torch.progress` for Keras.

    Args:
        batch_size: Rows of a batch on this rank, for a number of samples a second.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._progress: Progress[Any] | None = None
        self._fetching: AbstractContextManager[None] | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        asked = self.params or {}
        self._progress = progress(
            total=asked.get("steps"), epoch=epoch, epochs=asked.get("epochs"), batch_size=self.batch_size
        )
        self._fetch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        self._fetched()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        assert self._progress is not None
        self._progress.step()
        self._progress.report(**{name: float(value) for name, value in (logs or {}).items()})
        self._fetch()

    def on_test_begin(self, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        self._fetched()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        self._fetched()
        if self._progress is not None:
            self._progress.report(**{name: float(value) for name, value in (logs or {}).items()})
            self._progress.close()

    def _fetch(self) -> None:
        assert self._progress is not None
        self._fetching = self._progress.fetching()
        self._fetching.__enter__()

    def _fetched(self) -> None:
        if self._fetching is not None:
            self._fetching.__exit__(None, None, None)
            self._fetching = None


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ProgressCallback",
]
