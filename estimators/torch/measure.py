"""Computes loss and metrics of a batch, in training and validation, and those of a whole validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

import spark_hvd.torch as hvd
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.torch.objective import Metrics, Objective, ValidationSums
from spark_hvd.estimators.torch.weighted import Shares
from spark_hvd.estimators.training.inputs import outputs_of, tensors_of, weights_of
from spark_hvd.estimators.training.spec import losses_of
from spark_hvd.estimators.training.train import Job

LossT = TypeVar("LossT")

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Measure:
    """The model of a job, its losses and metrics; the model is moved to the job's device."""

    def __init__(self, job: Job) -> None:
        self.job, self.spec = job, job.spec
        spec, objects = job.spec, job.objects
        self.model = objects.model.to(job.device)
        losses = losses_of(objects, job.device) or [_no_loss]
        losses = [loss.to(job.device) if isinstance(loss, torch.nn.Module) else loss for loss in losses]
        self.objective = Objective(losses, spec.loss_weights, len(spec.labels), spec.reshape_labels)
        lowest = [job.lowest(label.column.name) for label in spec.labels]
        counted = objects.reader.get("collate") is not None
        self.shares = Shares(self.objective.losses, lowest, spec.reductions, counted)
        self.metrics = Metrics(objects.metrics, [label.column.name for label in spec.labels])

    def validated(self, ranks: int | None = None) -> ValidationSums:
        """Return the sums over this rank's validation rows.

        With ``ranks``, the batches are those of that many ranks, and each of ours takes the batches of some of them.
        """
        assert self.job.validation is not None
        self.model.eval()
        sums, size = self.no_validation(), ranks or hvd.size()
        with torch.no_grad():
            for rank in range(hvd.rank(), size, hvd.size()):
                weights = self.job.validation.weights(rank, size)
                for batch, weight in zip(self.job.validation_batches(rank, size), weights, strict=False):
                    inputs, labels, row_weights = self._on_device(batch)
                    if rows := len(inputs[0]):
                        outputs, labels, losses = self._forward(inputs, labels, row_weights, self.objective.parts)
                        losses, divisors = self.shares.in_validation(losses, labels, rows, weight, size)
                        sums.add(rows, losses, divisors, self.metrics(outputs, labels))
        return sums

    def no_validation(self) -> ValidationSums:
        """Return the sums over no rows."""
        return ValidationSums(self.metrics.names, self.objective.weights, self.job.device)

    def means(self, sums: ValidationSums) -> dict[str, float]:
        """Return the means of a validation, as the history has them; all ranks must call this."""
        total = hvd.allreduce(sums.values, op=hvd.Sum, name="spark_hvd.validated")
        return sums.means_of(total.tolist())

    def _on_device(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        spec, device = self.spec, self.job.device
        weights = weights_of(spec.sample_weight_col, batch)
        weights = None if weights is None else weights.to(device)
        return tensors_of(spec.inputs, batch, device), tensors_of(spec.labels, batch, device), weights

    def _by_row(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the value whose mean over the rows of a batch on all ranks is the loss."""
        weight = self.shares.weight
        return loss.detach() / weight if weight not in (0.0, 1.0) else loss.detach()

    def _forward(
        self,
        inputs: list[torch.Tensor],
        labels: list[torch.Tensor],
        weights: torch.Tensor | None,
        loss_of: Callable[..., LossT],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], LossT]:
        half = _HALF.get(self.spec.precision)
        with torch.autocast(self.job.device.type, dtype=half, enabled=half is not None):
            outputs, labels = self.objective.transform_outputs(outputs_of(self.model(*inputs)), labels)
            return outputs, labels, loss_of(outputs, labels, weights)


def _no_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    raise ValueError("loss_fn was called, but no loss was given: pass loss= to the estimator")
