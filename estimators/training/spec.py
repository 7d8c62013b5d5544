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
    """A training.

    Attributes:
        inputs: Arguments of the model, in order.
        labels: What its outputs are compared with.
        weight: Column of sample weights.
        train: Data to train on.
        validation: Data to validate on after each epoch.
        store: Where the run lies.
        run_id: Its name.
        batch_size: Rows of a batch of one rank.
        val_batch_size: The same in validation.
        epochs: Passes over the data; also counting those that a resumed run has done.
        steps: Batches of an epoch on each rank, where not one pass.
        val_steps: Batches of a validation on each rank, where not one pass.
        backward_passes: Batches whose gradients are averaged into one step.
        seed: Of everything random.
        shuffle: Whether batches are drawn anew in each epoch.
        scale_lr: Multiply learning rates by the number of ranks.
        precision: "32", or what forward and loss are computed in: "bf16", "fp16".
        clip_norm: Norm that gradients, averaged over ranks, are scaled down to.
        clip_value: Bound of each of their elements.
        lr_interval: When the scheduler steps: "epoch" or "step".
        terminate_on_nan: Raise when a loss is not finite; else leave such steps out.
        monitor: Key of the history by which the best epoch is told; None for ``val_loss`` or ``loss``.
        monitor_mode: "min" or "max".
        reshape_labels: Give labels the shape of outputs.
        loss_weights: One for each label.
        use_gpu: Train on a GPU where the rank has one.
        verbose: 0 nothing, 1 a line an epoch, 2 the steps of the way too.
        reader: Fields of ReaderSpec, and "kind"; the same for training and validation but for ``workers``.
        val_workers: ``workers`` in validation.
        checkpoint_every: Batches between checkpoints within an epoch; None for none.
        resume: Whether the run has a checkpoint to go on from.
        trainer: What LightningEstimator gives to the Trainer.
    """

    inputs: tuple[TensorSpec, ...]
    labels: tuple[TensorSpec, ...]
    weight: str | None
    train: DatasetMeta
    validation: DatasetMeta | None
    store: Store
    run_id: str
    batch_size: int
    val_batch_size: int
    epochs: int
    steps: int | None = None
    val_steps: int | None = None
    backward_passes: int = 1
    seed: int = 0
    shuffle: bool = True
    scale_lr: bool = True
    precision: str = "32"
    clip_norm: float | None = None
    clip_value: float | None = None
    lr_interval: str = "epoch"
    terminate_on_nan: bool = True
    monitor: str | None = None
    monitor_mode: str = "min"
    reshape_labels: bool = True
    loss_weights: tuple[float, ...] | None = None
    use_gpu: bool = True
    verbose: int = 1
    reader: Mapping[str, Any] = field(default_factory=dict)
    val_workers: int = 2
    checkpoint_every: int | None = None
    resume: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that a rank reads, each once."""
        weight = [self.weight] if self.weight else []
        return tuple(dict.fromkeys([*(spec.column.name for spec in (*self.inputs, *self.labels)), *weight]))

    def pass_steps(self, size: int) -> int:
        """Batches that one pass over the training data has on each of ``size`` ranks."""
        return steps_of(self.train.rows, size, self.batch_size, self.reader.get("drop_last", False))

    def validation_steps(self, size: int) -> int:
        """Batches of a validation on each of ``size`` ranks."""
        assert self.validation is not None
        steps = steps_of(self.validation.rows, size, self.val_batch_size)
        return min(steps, self.val_steps or steps)

    def epoch_steps(self, size: int) -> int:
        """Batches of an epoch on each of ``size`` ranks."""
        return self.steps or self.pass_steps(size)


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
