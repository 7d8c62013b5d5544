"""The parts that a Lightning Trainer needs to run in an existing rank: its world, its loaders, its checkpoints.

Lightning exists as two packages, ``lightning`` and ``pytorch_lightning``, whose classes are unrelated. We use the one
that defines the module, so classes that extend Lightning's are created once it is known.
"""

from __future__ import annotations

import importlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.training.inputs import argument_names, tensors_of, weights_of
from spark_hvd.estimators.training.spec import TrainSpec
from spark_hvd.estimators.training.train import Job
from spark_hvd.store.errors import CheckpointError

KEEP = "spark_hvd-keep"
"""The path under which a checkpoint stays in memory."""
PROFILERS = {"simple": "SimpleProfiler", "advanced": "AdvancedProfiler", "pytorch": "PyTorchProfiler"}
"""Names of profilers -> Lightning's classes."""


def package_of(module: Any) -> Any:
    """Return ``lightning.pytorch`` or ``pytorch_lightning``, the package of the module's LightningModule."""
    base = next(base for base in type(module).__mro__ if base.__name__ == "LightningModule")
    name = "pytorch_lightning" if base.__module__.startswith("pytorch_lightning") else "lightning.pytorch"
    for part in ("plugins.environments", "plugins.io", "loggers.logger"):  # the package itself loads only some
        importlib.import_module(f"{name}.{part}")
    return importlib.import_module(name)


def be_quiet() -> None:
    """Hide Lightning's tips and reports of its choices; warnings and output of callbacks stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(f"{name}.callbacks").setLevel(logging.INFO)


def batch_dict(spec: TrainSpec, batch: Batch) -> Batch:
    """Return the argument of a step: each feature and label in its shape and dtype, and the weight, by column name.

    Stacked features form one tensor, "features".
    """
    return dict(named_tensors(spec, batch))


def named_tensors(spec: TrainSpec, batch: Batch) -> list[tuple[str, torch.Tensor]]:
    """Return names and tensors of the features, the labels and the weight; a column may have several of these roles."""
    roles = [(argument_names(specs), tensors_of(specs, batch)) for specs in (spec.inputs, spec.labels)]
    if (weights := weights_of(spec.sample_weight_col, batch)) is not None:
        roles.append(([str(spec.sample_weight_col)], [weights]))
    return [pair for names, tensors in roles for pair in zip(names, tensors, strict=True)]


class ValidationLoader:
    """All batches of a validation, at each iteration."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __len__(self) -> int:
        return self._job.validation_steps

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._job.validation_batches():
            yield batch_dict(self._job.spec, batch)


def make_strategy(
    pl: Any,
    device: torch.device,
    checkpoint_io: Any,
    find_unused_parameters: bool,
    factor: Callable[[], float] = lambda: 1.0,
) -> Any:
    """Make a strategy for DDP over the process group that the runner has initialised.

    We use DDP and not hvd.DistributedOptimizer, which belongs to one optimizer that gets each gradient once per step.
    Modules of Lightning have several optimizers, toggle them, and clip, scale and accumulate within Lightning's own
    closure around ``step``. Lightning drives DDP through all of that. Gradients are averaged over the same process
    group either way.

    ``factor`` returns the factor for the loss of this rank's present batch.
    """

    class Environment(pl.plugins.environments.ClusterEnvironment):  # type: ignore[misc] # Any
        """The ranks as the runner has placed them."""

        creates_processes_externally = True
        main_address, main_port = "", 0  # only init_process_group needs them, and it has been called

        @staticmethod
        def detect() -> bool:
            return False

        def world_size(self) -> int:
            return hvd.size()

        def set_world_size(self, size: int) -> None:
            pass

        def global_rank(self) -> int:
            return hvd.rank()

        def set_global_rank(self, rank: int) -> None:
            pass

        def local_rank(self) -> int:
            return hvd.local_rank()

        def node_rank(self) -> int:
            return hvd.cross_rank()

    class Strategy(pl.strategies.DDPStrategy):  # type: ignore[misc] # Any
        """Gives a rank its one device, whatever its local rank."""

        @property
        def root_device(self) -> torch.device:
            return device

        def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
            """Scale the loss so that the mean over ranks is the mean over all rows."""
            share = factor()
            return super().backward(closure_loss if share == 1.0 else closure_loss * share, *args, **kwargs)

        def optimizer_step(
            self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
        ) -> Any:
            """Give LBFGS the loss over all rows: it also decides how often to evaluate the loss."""

            def everybodys() -> Any:
                loss = closure()
                return hvd.allreduce(loss.detach() * factor(), op=hvd.Average, name="spark_hvd.lightning.loss")

            decides = isinstance(optimizer, torch.optim.LBFGS) and hvd.size() > 1
            return super().optimizer_step(optimizer, everybodys if decides else closure, *args, **kwargs)

        def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            """Save on every rank if the checkpoint stays in memory."""
            if filepath == KEEP:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
            else:
                super().save_checkpoint(checkpoint, filepath, storage_options)

        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            """Average integers as floats.

            Lightning divides the mean of sums by the mean of row counts; as an integer, the latter would be truncated
            whenever one rank has a row more.
            """
            if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
                tensor = tensor.double()
            return super().reduce(tensor, group, reduce_op)

    return Strategy(
        cluster_environment=Environment(), checkpoint_io=checkpoint_io, find_unused_parameters=find_unused_parameters
    )


def make_checkpoint_io(pl: Any, given: dict[str, Any] | None) -> Any:
    """Return a CheckpointIO that keeps what is written to KEEP as ``kept``, and reads ``given`` from there."""

    class InMemory(pl.plugins.io.TorchCheckpointIO):  # type: ignore[misc] # Any
        """Handles files as usual."""

        kept: dict[str, Any] | None = None

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            if path == KEEP:
                self.kept = checkpoint
            else:
                super().save_checkpoint(checkpoint, path, storage_options)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            return given if path == KEEP else super().load_checkpoint(path, *args, **kwargs)

    return InMemory()


def to_bytes(checkpoint: dict[str, Any]) -> torch.Tensor:
    """Serialize a Lightning checkpoint without what is stored elsewhere: weights, and the module's hyperparameters."""
    left_out = ("state_dict", "hyper_parameters", "hparams_name", "hparams_type")
    data = io.BytesIO()
    torch.save({key: value for key, value in checkpoint.items() if key not in left_out}, data)
    # As one tensor, whatever callbacks put into it: so the weights next to it can be read without it.
    return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def from_bytes(data: torch.Tensor, run_id: str) -> dict[str, Any]:
    """Do the inverse of :func:`to_bytes`.

    Raises:
        CheckpointError: The checkpoint contains code, which is not run.
    """
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"run_id={run_id!r} cannot be resumed: a callback or on_save_checkpoint put objects into the checkpoint: "
            f"{str(error).splitlines()[0]} Put plain data and tensors there, or name their classes with "
            "torch.serialization.add_safe_globals where the module is defined"
        ) from error
    return state


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """Return ``value`` with ``change`` applied to each text in it, within dicts, lists and tuples."""
    if isinstance(value, str):
        return change(value)
    if type(value) is dict:
        return {replaced(key, change): replaced(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(item, change) for item in value)
    return value
