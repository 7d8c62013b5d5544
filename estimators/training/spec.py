"""What a training is: plain frozen data, all of it checked on the driver; what a rank knows besides its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_hvd.estimators.readers.dataset import DatasetMeta
from spark_hvd.estimators.readers.sharding import steps_of
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.store import Store

if TYPE_CHECKING:
    import torch

PRECISIONS = ("32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """A training. Fields that bear the name of an estimator's parameter mean what that does.

    Attributes:
        inputs: Arguments of the model, in order.
        labels: What its outputs are compared with.
        train: Data to train on.
        validation: Data to validate on after each epoch.
        epochs: Passes over the data; also counting those that a resumed run has done.
        seed: Of everything random.
        reshape_labels: Give labels the shape of outputs.
        reader: Fields of ReaderSpec; the same for training and validation but for ``workers``.
        resume: Whether the run has a checkpoint to go on from.
        trainer: What LightningEstimator gives to the Trainer.
    """

    inputs: tuple[TensorSpec, ...]
    labels: tuple[TensorSpec, ...]
    sample_weight_col: str | None
    train: DatasetMeta
    validation: DatasetMeta | None
    store: Store
    run_id: str
    batch_size: int
    val_batch_size: int
    epochs: int
    train_steps_per_epoch: int | None = None
    validation_steps_per_epoch: int | None = None
    backward_passes_per_step: int = 1
    seed: int = 0
    shuffle: bool = True
    scale_lr: bool = True
    precision: str = "32"
    gradient_clip_norm: float | None = None
    gradient_clip_value: float | None = None
    lr_scheduler_interval: str = "epoch"
    terminate_on_nan: bool = True
    monitor: str | None = None
    monitor_mode: str = "min"
    reshape_labels: bool = True
    loss_weights: Sequence[float] | None = None
    use_gpu: bool = True
    verbose: int = 1
    reader: Mapping[str, Any] = field(default_factory=dict)
    val_reader_num_workers: int = 2
    checkpoint_every: int | None = None
    resume: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that a rank reads, each once."""
        weight = [self.sample_weight_col] if self.sample_weight_col else []
        return tuple(dict.fromkeys([*(spec.column.name for spec in (*self.inputs, *self.labels)), *weight]))

    def pass_steps(self, size: int) -> int:
        """Batches that one pass over the training data has on each of ``size`` ranks."""
        return steps_of(self.train.rows, size, self.batch_size, self.reader.get("drop_last", False))

    def validation_steps(self, size: int) -> int:
        """Batches of a validation on each of ``size`` ranks."""
        assert self.validation is not None
        steps = steps_of(self.validation.rows, size, self.val_batch_size)
        return min(steps, self.validation_steps_per_epoch or steps)

    def epoch_steps(self, size: int) -> int:
        """Batches of an epoch on each of ``size`` ranks."""
        return self.train_steps_per_epoch or self.pass_steps(size)


@dataclass(frozen=True)
class Objects:
    """What a training needs that is code: pickled together, so that an optimizer keeps the parameters of its model.

    Attributes:
        model: The model.
        optimizer: An optimizer of its parameters, or a function that makes one.
        scheduler: A learning rate scheduler of the optimizer, or a function that makes one.
        losses: Loss functions, or None.
        loss_constructors: Functions that make them in the rank.
        metrics: Groups of metrics.
        callbacks: Of type Callback.
        minibatch: Replaces forward, loss and backward of a batch.
        compression: Of gradients.
        reader: Functions for ReaderSpec: decoders, transformation_fn.
    """

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any = None
    losses: Sequence[Any] = ()
    loss_constructors: Sequence[Callable[..., Any]] = ()
    metrics: Sequence[Sequence[Callable[..., Any]]] = ()
    callbacks: Sequence[Any] = ()
    minibatch: Callable[..., Any] | None = None
    compression: Any = None
    reader: Mapping[str, Any] = field(default_factory=dict)
