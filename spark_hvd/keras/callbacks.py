"""Callbacks for ``model.fit``, with Horovod's names: ``hvd.callbacks``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.context.basics import rank, size
from spark_hvd.context.progress import Progress, progress
from spark_hvd.keras.backend import broadcast_variables
from spark_hvd.keras.optimizer import OUTSIDE, DistributedKerasOptimizer


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Sets the learning rate to a multiple of the initial one, from one epoch to another.

    Args:
        initial_lr: The learning rate to multiply.
        multiplier: A function of the epoch, or a number that is raised to the number of epochs since `start_epoch`.
        start_epoch: The first epoch, from 0.
        end_epoch: One past the last epoch; None: all further epochs.
        staircase: Whether the rate changes only at the start of an epoch; otherwise it changes with each batch.
        momentum_correction: Scale accumulated momentum with the rate, in optimizers whose momentum includes the rate
            (SGD, RMSprop), as in Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677).
        steps_per_epoch: Batches per epoch; None: as `fit` reports. Required if `fit` does not know and `staircase` is
            off.
    """

    __module__ = "spark_hvd.keras.callbacks"

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self._steps_given = self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: float(multiplier ** (epoch - start_epoch))
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        if self._steps_given is None:  # each fit has its own
            self.steps_per_epoch = (self.params or {}).get("steps")
        if self.steps_per_epoch is None and not self.staircase:
            raise ValueError(
                f"{type(self).__name__} changes the learning rate with each batch, but fit does not know how many "
                "there are in an epoch: pass steps_per_epoch=."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        if self.current_epoch < self.start_epoch or (self.end_epoch or float("inf")) <= self.current_epoch:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(self.current_epoch)

    def _set(self, epoch: float) -> None:
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        inner = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if self.momentum_correction and getattr(inner, "momentum", None) and old and new != old:
            for gathered in getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or ():
                if gathered is not None:
                    gathered.assign(gathered * (new / old))

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        if logs is not None:
            logs["lr"] = self._rate()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from one rank's to that of all ranks, with each batch of the first epochs.

    Args:
        initial_lr: The final learning rate, already scaled by the number of ranks.
        warmup_epochs: Number of epochs until then.
        momentum_correction: See LearningRateScheduleCallback.
        steps_per_epoch: See LearningRateScheduleCallback.
        verbose: 1: rank 0 reports the end of the warm-up.
    """

    __module__ = "spark_hvd.keras.callbacks"

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            progress = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return 1 / size() + progress * (1 - 1 / size())

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and epoch + 1 == self.end_epoch and rank() == 0:
            print(f"Epoch {epoch + 1}: warm-up has ended, the learning rate is {self._rate():g}.", flush=True)


_log = logging.getLogger("spark_hvd")


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Starts all ranks with the same values: the weights of the model and the variables of its optimizer.

    It overwrites them at the start of training, before the first batch.

    Args:
        root_rank: The rank whose values all ranks get.
        device: Accepted for Horovod's sake; has no effect.
        local_variables: A list of variables of the model or its optimizer that each rank keeps.
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
        # The optimizer from compile(), or those of a custom train_step.
        if model.jit_compile and any(isinstance(each, DistributedKerasOptimizer) for each in vars(model).values()):
            _log.warning("jit_compile of model %r is switched off: XLA cannot compile the exchange", model.name)
            model.jit_compile = False

    def on_train_begin(self, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [*self.model.weights, *([] if optimizer is None else optimizer.variables)]
        broadcast_variables([each for each in variables if id(each) not in self._local], self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Replaces the metrics of each epoch with their means over all ranks, for later callbacks and for the history.

    Each rank has the same weight. A metric that some ranks lack is the mean of the others.

    Args:
        device: Accepted for Horovod's sake; has no effect.
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
    """Keras' ModelCheckpoint that saves the best model so far, by a metric.

    Args:
        filepath: Where to save it. None: an estimator sets it; with Keras' `fit`, pass a path, on rank 0 only.
        monitor: The metric, by its name in the logs of an epoch.
        verbose: 1: report each save.
        save_weights_only: Save only the weights, not the model.
        mode: "min", "max", or "auto", which follows from the metric's name.
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
        # Keras checks the name's ending at once, so it needs some name.
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
            raise ValueError("BestModelCheckpoint has no filepath=, so it cannot save. Pass filepath=.")
        super().on_train_begin(logs)


class ProgressCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Shows `fit`'s progress, loss and metrics on the driver: :func:`spark_hvd.torch.progress` for Keras.

    Args:
        batch_size: Rows per batch on this rank, to report samples per second.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._progress: Progress[Any] | None = None
        self._fetching: AbstractContextManager[None] | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        params = self.params or {}
        self._progress = progress(
            total=params.get("steps"), epoch=epoch, epochs=params.get("epochs"), batch_size=self.batch_size
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
