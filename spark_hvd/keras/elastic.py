"""The API of elastic training with Keras: ``hvd.elastic``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from spark_hvd.elastic.state import ObjectState, State
from spark_hvd.keras.backend import assign, name_of, tensor_of
from spark_hvd.torch.elastic import TorchState, built_optimizer
from spark_hvd.torch.handlers import StateDictHandler, difference, get_handler_registry
from spark_hvd.world.errors import HostsUpdatedInterrupt

if keras.config.backend() == "tensorflow":
    from spark_hvd.tensorflow.elastic import run
else:
    from spark_hvd.elastic.run import run  # type: ignore[assignment] # by its bound


class _VariablesHandler(StateDictHandler):
    """Handles a model's weights (seeds and metrics stay each rank's own), or an optimizer's variables."""

    copies = True
    reloads = False

    def _named(self) -> Iterator[tuple[str, Any]]:
        of = self.value
        variables = of.weights if isinstance(of, keras.Model) else of.variables
        return ((name_of(place, variable), variable) for place, variable in enumerate(variables))

    def state(self) -> Any:
        return {name: tensor_of(variable) for name, variable in self._named()}

    def load(self, state: Any) -> None:
        for name, variable in self._named():
            assign(variable, state[name])

    def misfit(self, skeleton: Any) -> str | None:
        return difference(self.state(), skeleton)


get_handler_registry()[:0] = [(keras.Model, _VariablesHandler), (keras.optimizers.Optimizer, _VariablesHandler)]


class KerasState(TorchState):
    """The state of a Keras training: the weights of a model, the variables of its optimizer, and plain objects.

    Args:
        model: A model that is built and compiled.
        optimizer: Its optimizer; None: the one that it was compiled with.
        **kwargs: See :class:`spark_hvd.elastic.state.ObjectState`; the callbacks update `epoch=0` and `batch=0`.

    Raises:
        ValueError: The model has no variables yet.
    """

    __module__ = "spark_hvd.keras.elastic"

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model=model, optimizer=built_optimizer(model, optimizer), **kwargs)


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Commits the state every few batches and after each epoch; it must be the last callback.

    Args:
        state: The state of the elastic function.
        batches_per_commit: Number of batches per commit; after a failure, batches since the last commit are repeated.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit={batches_per_commit}: expected 1 or more.")
        self.state, self.batches_per_commit = state, batches_per_commit
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        self._batches += 1
        if self._batches % self.batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Keeps in `state.batch` how many batches of the epoch are done, 0 between epochs.

    After a restore, `fit` starts with the rest of the epoch, provided that its data start with batch `state.batch`; the
    callback continues the count from there.

    Args:
        state: The state of the elastic function, made with `batch=0`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        self.state.batch += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc] # Any
    """Keeps in `state.epoch` how many epochs are done: ``fit(..., initial_epoch=state.epoch, epochs=epochs)``.

    Args:
        state: The state of the elastic function, made with `epoch=0`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        self.state.epoch += 1


__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
