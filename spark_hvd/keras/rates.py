"""Learning rates that change while a Keras model is fitted: schedules and the warm-up of many ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from spark_hvd.context.who import rank, size


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Set the learning rate to a multiple of the first one, from one epoch to another.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A function of the epoch; or a number, to the power of the number of epochs since `start_epoch`.
        start_epoch: The first epoch, from 0.
        end_epoch: The first epoch that is no more of it; None: all.
        staircase: Whether the rate changes at the start of an epoch only; else with each batch.
        momentum_correction: Scale what momentum has gathered as the rate, in optimizers where the rate is part of that
            (SGD, RMSprop), as in Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677).
        steps_per_epoch: Batches of an epoch; None: as `fit` says. Needed where it does not and `staircase` is off.
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
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: float(multiplier ** (epoch - start_epoch))
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        if self.steps_per_epoch is None:
            self.steps_per_epoch = (self.params or {}).get("steps")
        if self.steps_per_epoch is None and not self.staircase:
            raise ValueError(
                f"{type(self).__name__} changes the learning rate with each batch, and fit does not say how many an "
                "epoch has: give it steps_per_epoch=."
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
    """Let the learning rate grow from a rank's to that of all of them, with each batch of the first epochs.

    Args:
        initial_lr: The learning rate in the end, already scaled by the number of ranks.
        warmup_epochs: How many epochs it takes.
        momentum_correction: See LearningRateScheduleCallback.
        steps_per_epoch: See LearningRateScheduleCallback.
        verbose: 1: rank 0 says when it is over.
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
            done = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return 1 / size() + done * (1 - 1 / size())

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
            print(f"Epoch {epoch + 1}: the learning rate is warm, {self._rate():g}.", flush=True)
