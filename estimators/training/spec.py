"""The specification of a training: plain frozen data, checked on the driver, for the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from spark_hvd.data.readers.batches import STACK
from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.data.readers.errors import without_nan
from spark_hvd.data.readers.measure import Uses
from spark_hvd.data.readers.sharding import steps_of
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.store import Store
from spark_hvd.world.words import count

PRECISIONS = ("32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """A training. Fields with the name of an estimator's parameter have its meaning.

    Attributes:
        label: Distinguishes the fit from others of the estimator; empty for the first.
        inputs: Arguments of the model, in order.
        labels: Targets of the outputs, in order.
        columns: Names of all columns that a rank reads, each once.
        train: Data to train on.
        validation: Data to validate on after each epoch.
        epochs: Passes over the data, including those that a resumed run has done.
        seed: Seed of everything random.
        draws_seed: Whether the seed was drawn, so that the rest of a run takes that of its checkpoint.
        reshape_labels: Give labels the shape of outputs.
        reader: Fields of ReaderSpec; the same for training and validation except for ``workers``.
        keeps_epochs: Whether the weights of each epoch are kept in the store.
        resume: Whether to resume from the run's checkpoint, if there is one.
        fit_id: Identifies the fit among those of the run; None if no other process can reach its checkpoints.
        former_fit: The owner of the run's checkpoints when the driver read them.
        returns_state: Driver and ranks share no storage for checkpoints: rank 0 keeps them on its host, and returns the
            one of the trained model.
        trainer: Arguments of LightningEstimator's Trainer.
        derived: What the driver has computed from the data, and a resumed fit must share, such as the names of classes.
            Values are those that a checkpoint can hold.
        needs_two_rows: The layer that cannot train on a batch of one row.
        reductions: How the loss of each label reduces its rows, such as by a "mean" or a "sum", if known.
    """

    label: str = ""
    inputs: tuple[TensorSpec, ...]
    labels: tuple[TensorSpec, ...]
    columns: tuple[str, ...]
    train: DatasetMeta
    validation: DatasetMeta | None
    store: Store
    run_id: str
    batch_size: int
    val_batch_size: int
    epochs: int
    sample_weight_col: str | None = None
    train_steps_per_epoch: int | None = None
    validation_steps_per_epoch: int | None = None
    backward_passes_per_step: int = 1
    seed: int = 0
    draws_seed: bool = False
    shuffle: bool = True
    drop_last: bool = False
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
    validation_in_background: int = 0
    checkpoint_every: int | None = None
    elastic: bool = False
    commit_every: int | None = None
    keeps_epochs: bool = False
    resume: bool = False
    fit_id: str | None = None
    former_fit: str | None = None
    returns_state: bool = False
    restore_best_weights: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Any] = field(default_factory=dict)
    needs_two_rows: str | None = None
    reductions: tuple[str | None, ...] = ()

    def epoch_steps(self, size: int) -> int:
        """Return the number of batches in an epoch on each of ``size`` ranks."""
        return self.train_steps_per_epoch or steps_of(self.train.rows, size, self.batch_size, self.drop_last)

    @property
    def device(self) -> torch.device:
        """The device on which this rank trains."""
        available = self.use_gpu and torch.cuda.is_available()  # the runner has made this rank's GPU the current one
        return torch.device("cuda", torch.cuda.current_device()) if available else torch.device("cpu")

    def for_rest(self, state: Mapping[str, Any]) -> TrainSpec:
        """Return the specification for the rest of the run whose checkpoint has this state."""
        return replace(self, seed=state["seed"]) if self.draws_seed else self

    @property
    def validation_depends_on_batches(self) -> bool:
        """Whether it matters which rows form a batch: only the first ones may be used, or a loss is their sum."""
        first = bool(self.validation_steps_per_epoch) or "limit_val_batches" in self.trainer.get("args", {})
        return first or "sum" in self.reductions

    @property
    def stack(self) -> tuple[str, ...]:
        """Names of the inputs' columns if batches may have them as one tensor; empty if each is needed by itself."""
        names = tuple(each.column.name for each in self.inputs)
        dtypes = {each.dtype for each in self.inputs}
        if len(dtypes) != 1 or not all(
            each.stacked and each.shape is None and each.column.shape == () for each in self.inputs
        ):
            return ()
        dtype = dtypes.pop()
        exact = dtype is None or getattr(torch, dtype).is_floating_point  # other dtypes refuse values, by column
        others = {self.sample_weight_col, *(each.column.name for each in self.labels)}
        return names if exact and len(set(names)) == len(names) and others.isdisjoint(names) else ()

    @property
    def uses(self) -> Uses:
        """How the training uses its columns."""
        return Uses(self.sample_weight_col, tuple(each.column.name for each in self.labels))

    def not_finite(self, tensors: Mapping[str, Any]) -> str:
        """Describe the first column of a batch with NaN or infinite values, and what to do; "" if there is none."""
        types = {each.column.name: each.column.spark_type for each in (*self.inputs, *self.labels)}
        stack = tensors.get(STACK)  # hooks of a LightningModule may have changed or renamed it
        if self.stack and isinstance(stack, torch.Tensor) and stack.shape[1:] == (len(self.stack),):
            tensors = {**dict(zip(self.stack, stack.unbind(1), strict=True)), **tensors}
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):  # text
                continue
            odd = ~tensor.isfinite()
            if odd.any():
                row, value = int(odd.nonzero()[0, 0]), float(tensor[odd][0])
                first = f"the first, {value}, in row {row} of the batch"
                remedy = without_nan(name, types.get(name, ""))
                return f"column {name!r} has {count(int(odd.sum()), 'value')} NaN or infinite, {first}. {remedy}"
        return ""


@dataclass(frozen=True)
class Objects:
    """The code of a training, pickled together, so that an optimizer keeps the parameters of its model.

    Fields have the meaning of the parameters with their names; ``reader`` has functions for ReaderSpec.
    """

    model: torch.nn.Module
    optimizer: Any = None
    lr_scheduler: Any = None
    loss: Sequence[Any] = ()
    loss_constructors: Sequence[Callable[..., Any]] = ()
    metrics: Sequence[Sequence[Callable[..., Any]]] = ()
    callbacks: Sequence[Any] = ()
    train_minibatch_fn: Callable[..., Any] | None = None
    gradient_compression: Any = None
    reader: Mapping[str, Any] = field(default_factory=dict)


def losses_of(objects: Objects, device: torch.device | str = "cpu") -> list[Any]:
    """Return the losses. Constructors get the model and the device, if they have such parameters."""
    made = [calling(make)(model=objects.model, device=torch.device(device)) for make in objects.loss_constructors]
    return made or list(objects.loss)


def calling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it gets only those keyword arguments that it declares."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function
    return lambda **kwargs: function(**{name: value for name, value in kwargs.items() if name in parameters})
