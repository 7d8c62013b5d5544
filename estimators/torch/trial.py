"""Tries one batch with a model and its losses on the driver, as TorchEstimator's ranks would process it."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from spark_hvd.checkpoint.format import check_plain
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.fit.trial import check_loss, describe, failed, losses_known
from spark_hvd.estimators.torch.learning_rate import make_optimizer, make_scheduler
from spark_hvd.estimators.torch.model import TorchModel
from spark_hvd.estimators.torch.objective import Metrics, Objective
from spark_hvd.estimators.torch.weighted import LossReduction, reduction_seen
from spark_hvd.estimators.training.callbacks import CSVLogger, EarlyStopping, MLflow, TensorBoard
from spark_hvd.estimators.training.head import known_as
from spark_hvd.estimators.training.history import NOT_MEANS
from spark_hvd.estimators.training.inputs import argument_names, outputs_of, tensors_of, weights_of
from spark_hvd.estimators.training.spec import Objects, TrainSpec

_log = logging.getLogger(__name__)
_ADD_NO_KEYS = (EarlyStopping, CSVLogger, TensorBoard, MLflow)
"""Callbacks that do not change the keys of the history."""


def try_batch(spec: TrainSpec, objects: Objects, batch: Batch) -> TrainSpec:
    """Run a step, the metrics and a checkpoint's content for one batch, on a copy of the model.

    Returns:
        The specification, with the reductions observed for the losses.

    Raises:
        ModelError: A part failed; the text names it and the shapes and dtypes of its inputs.
    """
    objects = copy.deepcopy(objects)
    model = objects.model.train()
    given: list[str] = []
    try:
        inputs, labels = tensors_of(spec.inputs, batch), tensors_of(spec.labels, batch)
    except DataError:
        raise
    except ValueError as error:
        raise ModelError(f"{error}. Change input_shapes or label_shapes") from error
    names = [*argument_names(spec.inputs), *argument_names(spec.labels)]
    given = [f"{name}: {describe(tensor)}" for name, tensor in zip(names, (*inputs, *labels), strict=True)]
    outputs = _step("model(*inputs)", given, lambda: outputs_of(model(*inputs)))
    given.append(f"outputs: {'; '.join(map(describe, outputs))}")
    weights = weights_of(spec.sample_weight_col, batch)
    if weights is not None and weights.dim() != 1:
        raise ModelError(
            f"sample_weight_col={spec.sample_weight_col!r}: expected one number per row, got {describe(weights)}"
        )
    optimizer = make_optimizer(objects.optimizer, model)
    scheduler = make_scheduler(objects.lr_scheduler, optimizer, 1, 100)

    def check_state() -> None:
        for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
            check_plain(None if part is None else part.state_dict(), name)

    _step("a checkpoint", given, check_state)
    metrics = Metrics(objects.metrics, [label.column.name for label in spec.labels])
    _check_monitors(spec, objects, metrics.names)
    losses = losses_known(objects)
    if objects.loss_constructors and not losses:
        return spec  # it is made only in the rank
    if objects.train_minibatch_fn is not None:  # which alone knows how to call it
        return replace(spec, reductions=tuple(LossReduction.of(loss).kind for loss in losses))
    objective = Objective(losses, spec.loss_weights, len(spec.labels), spec.reshape_labels)
    outputs, labels = _step("model(*inputs)", given, lambda: objective.transform_outputs(outputs, labels))
    with warnings.catch_warnings():
        # torch only warns when it compares each output with each label, which is never intended
        warnings.filterwarnings("error", message="Using a target size")
        loss = _step("the loss of outputs and labels", given, lambda: objective(outputs, labels, weights))
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise ModelError(f"the loss of a batch is {describe(loss)}: expected a single number, such as a mean over rows")
    if not loss.requires_grad:
        raise ModelError("the loss does not depend on any trained parameter: is it computed under no_grad?")
    check_loss(spec, float(loss.detach()), batch)
    seen = tuple(
        _reduction(each, output.detach(), label)
        for each, output, label in zip(objective.losses, outputs, labels, strict=True)
    )
    _step("backward", given, loss.backward)
    _step("metrics", given, lambda: metrics(outputs, labels))
    _step("optimizer.step()", given, optimizer.step)
    _step("a checkpoint", given, check_state)  # most optimizers have a state only after a step
    return replace(spec, reductions=seen)


def _check_monitors(spec: TrainSpec, objects: Objects, metrics: Sequence[str]) -> None:
    """Check that the history will have the monitored values, unless one of the user's callbacks may add them.

    Raises:
        ValueError: A monitored value will be missing.
    """
    if any(type(each) not in _ADD_NO_KEYS for each in objects.callbacks):
        return
    stopping = [each.monitor for each in objects.callbacks if isinstance(each, EarlyStopping)]
    known = [f"{prefix}{name}" for prefix in ("", "val_") for name in ("loss", *metrics)] + list(NOT_MEANS)
    for monitor in (spec.monitor, *stopping):
        if monitor not in (None, *known):
            raise ValueError(f"monitor={monitor!r}: expected one of {known}")


def _reduction(loss: Any, output: torch.Tensor, label: torch.Tensor) -> str | None:
    """Return the reduction of a loss, observed if it does not declare one; None if nothing is observed."""
    declared = LossReduction.of(loss)
    if declared.by_class or declared.is_from_torch:
        return declared.kind
    kind = reduction_seen(loss, output, label)
    if kind is None:
        _log.warning(
            "the loss %s of a batch is neither the mean nor the sum of the losses of its parts: ranks compute it for "
            "their own rows, and the mean over ranks is weighted by rows, which is not the loss of all rows together. "
            "If classes have weights or labels are ignored, pass torch's own, such as nn.CrossEntropyLoss(weight=...)",
            known_as(loss),
        )
    return kind


def try_transform(model: TorchModel, inputs: Sequence[torch.Tensor], *, needed: bool) -> None:
    """Predict a batch, and its first row alone, with the untrained model, so that no trained model fails later.

    If training calls the model differently from transform (not ``needed``), a batch that fails only causes a warning.

    Raises:
        ModelError: The batch fails and ``needed`` is true; or the batch does not fail, but its first row alone does.
    """
    try:
        model.try_inputs(inputs)
    except ModelError as error:
        if needed:
            raise
        _log.warning("%s. Training continues, for uses of the model other than transform", error)
        return
    if len(inputs[0]) > 1:  # a partition may have a single row, and so may the last batch of any other
        model.try_inputs([tensor[:1] for tensor in inputs])


def _step(what: str, given: Sequence[str], do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Exception as error:
        raise failed(what, error, given) from error
