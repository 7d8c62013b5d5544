"""Losses and metrics of a Keras model, for a batch and for a whole validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.keras.module import Described, given_to_keras
from spark_hvd.estimators.training.inputs import tensors_of, weights_of
from spark_hvd.estimators.training.spec import Objects, TrainSpec
from spark_hvd.estimators.training.train import Job

Logs = dict[str, float]
NOTHING: dict[str, Any] = {"rows": 0, "metrics": [], "logs": {}, "own": []}


def compiled(spec: TrainSpec, objects: Objects, optimizer: Any) -> Any:
    """Return the model, compiled with its losses and metrics and this optimizer."""
    module: Any = objects.model
    model, custom = module.keras_model, module.custom_objects
    ((loss, weights),) = objects.loss
    metrics = Described.made(objects.metrics, custom) or None
    model.compile(
        optimizer,
        Described.made(loss, custom),
        loss_weights=weights,
        jit_compile=False,
        auto_scale_loss=False,  # a LossScaleOptimizer wraps the optimizer that reduces gradients
        **{"weighted_metrics" if spec.sample_weight_col else "metrics": metrics},
    )
    return model


def output_names(model: Any) -> list[str]:
    """Return the outputs' names in the order in which labels are compared with them. Keras sorts a dict by name."""
    made = getattr(model, "_outputs_struct", None)
    return sorted(made) if isinstance(made, Mapping) else list(getattr(model, "output_names", None) or ())


def batch_of(spec: TrainSpec, batch: Batch, model: Any, device: torch.device | str = "cpu") -> tuple[Any, Any, Any]:
    """Return the arguments of a step: inputs, labels and weights.

    Several values are a list. Labels and weights of a model whose outputs are a dict are a dict, too.
    """
    inputs, labels = tensors_of(spec.inputs, batch, device), tensors_of(spec.labels, batch, device)
    weights = weights_of(spec.sample_weight_col, batch)
    # A copy for each loss: if there is a mask, Keras on torch multiplies the weights by it in place.
    several = None if weights is None else [weights.to(device, copy=True) for _ in labels]
    names = output_names(model)
    if isinstance(getattr(model, "_outputs_struct", None), Mapping) and len(names) == len(labels):
        by_name = {name: given_to_keras(label) for name, label in zip(names, labels, strict=True)}
        return _one(inputs), by_name, several and dict(zip(names, map(given_to_keras, several), strict=True))
    return _one(inputs), _one(labels), several if several is None else _one(several)


def _one(values: Sequence[torch.Tensor]) -> Any:
    taken = [given_to_keras(value) for value in values]
    return taken[0] if len(taken) == 1 else taken


class KerasMeasure:
    """The model of a job, compiled with ``optimizer``, its losses and its metrics."""

    def __init__(self, job: Job, optimizer: Any) -> None:
        self.job, self.spec = job, job.spec
        self.model = compiled(job.spec, job.objects, optimizer)
        self._prepared = False

    def validated(self, callbacks: Any, ranks: int | None = None) -> dict[str, Any]:
        """Return this rank's part of a validation, see :meth:`measured`; empty if there are no rows for it.

        With ``ranks``, the batches are those of that many ranks, and each of ours takes the batches of some of them.
        """
        if self.job.validation is None:
            return NOTHING
        model, size = self.model, max(ranks or 1, hvd.size())
        model.make_test_function()
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        rows, number, logs = 0, 0, Logs()
        for rank in range(hvd.rank(), size, hvd.size()):
            for batch in self.job.validation_batches(rank, size):
                self.prepare(batch)
                given = self.given(batch)
                callbacks.on_test_batch_begin(number)
                found = model.test_function([given])
                logs = {name: float(value) for name, value in found.items()}
                callbacks.on_test_batch_end(number, logs)
                rows, number = rows + len(next(iter(batch.values()))), number + 1
                if model.stop_evaluating:
                    break
        callbacks.on_test_end(logs)
        return self.measured(rows, logs)

    def given(self, batch: Batch) -> tuple[Any, Any, Any]:
        """Return the arguments of a step, see :func:`batch_of`."""
        return batch_of(self.spec, batch, self.model, self.job.device)

    def prepare(self, batch: Batch) -> None:
        """Create the variables of the metrics. This takes a batch, once."""
        if not self._prepared:
            self._prepared = True
            self.model.test_on_batch(*self.given(batch))  # trains nothing
            self.model.reset_metrics()

    def means(self, validated: Mapping[str, Any]) -> Logs:
        """Return the values of a validation, as the history has them; all ranks must call this."""
        return in_validation(self.together(hvd.allgather_object(validated, name="spark_hvd.validated")))

    def measured(self, rows: int, logs: Logs) -> dict[str, Any]:
        """Return this rank's part of an epoch: its rows, the variables of its metrics, and their results."""
        from spark_hvd.keras.backend import tensor_of

        computed = self.model.get_metrics_result() if rows else {}
        # A user's train_step may log a value that is not a metric, or has the name of a metric that it does not update.
        # A compiled graph may round otherwise than the eager result.
        same = {
            name: math.isclose(float(each), logs[name], rel_tol=1e-6, abs_tol=1e-6)
            for name, each in computed.items()
            if name in logs
        }
        own = [name for name, equal in same.items() if equal]
        variables = [tensor_of(each).cpu().clone() for each in self.model.metrics_variables]
        return {"rows": rows, "metrics": variables, "logs": dict(logs), "own": own}

    def together(self, ranks: Sequence[Mapping[str, Any]]) -> Logs:
        """Compute metrics over the rows of all ranks, as in one process; other numbers are means weighted by rows."""
        from spark_hvd.keras.backend import assign

        variables = [] if not ranks[0]["metrics"] else self.model.metrics_variables
        for variable, *values in zip(variables, *(each["metrics"] for each in ranks), strict=True):
            assign(variable, joined(variable.aggregation, values))
        own = set(ranks[0]["own"]).intersection(*(each["own"] for each in ranks))
        metrics = self.model.get_metrics_result() if own else {}
        return means_of([(each["rows"], each["logs"]) for each in ranks]) | {name: float(metrics[name]) for name in own}


def in_validation(means: Mapping[str, float]) -> Logs:
    """Rename means as the history names those of a validation."""
    return {f"val_{name}": value for name, value in means.items()}


def joined(aggregation: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine the ranks' values of a variable, by the aggregation that Keras declares."""
    total = torch.stack(list(values)).sum(0).to(values[0].dtype)
    return total if aggregation == "sum" else total / len(values) if aggregation == "mean" else values[0]


def means_of(ranks: Sequence[tuple[int, Mapping[str, float]]]) -> Logs:
    """Return means over the rows of all ranks."""
    rows = sum(count for count, _ in ranks)
    names = dict.fromkeys(name for _, logs in ranks for name in logs)
    return {name: sum(count * float(logs.get(name, 0.0)) for count, logs in ranks) / rows for name in names}
