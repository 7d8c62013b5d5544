"""Callbacks for ``model.fit``, with Horovod's names: ``hvd.callbacks``."""

from __future__ import annotations

import logging
from typing import Any

import keras

from spark_hvd.collectives.objects import allgather_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.keras.backend import broadcast_variables
from spark_hvd.keras.optimizer import OUTSIDE, DistributedKerasOptimizer

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
        if isinstance(optimizer, DistributedKerasOptimizer) and model.jit_compile:
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


__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"]
