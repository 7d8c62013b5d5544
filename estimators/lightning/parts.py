"""What a Trainer of Lightning needs to run in a rank that is there already: its world, its loaders, its checkpoints.

Lightning comes as two packages, ``lightning`` and ``pytorch_lightning``, whose classes are strangers to each other. The
one that the module was made with is used throughout, so classes that extend Lightning's are made when it is known.
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
    """``lightning.pytorch`` or ``pytorch_lightning``: where the module's LightningModule comes from."""
    base = next(base for base in type(module).__mro__ if base.__name__ == "LightningModule")
    name = "pytorch_lightning" if base.__module__.startswith("pytorch_lightning") else "lightning.pytorch"
    for part in ("plugins.environments", "plugins.io", "loggers.logger"):  # the package itself loads not all of them
        importlib.import_module(f"{name}.{part}")
    return importlib.import_module(name)


def be_quiet() -> None:
    """Leave Lightning's tips and what it says of its choices out of the output; warnings stay, and callbacks' words."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(f"{name}.callbacks").setLevel(logging.INFO)


def batch_dict(spec: TrainSpec, batch: Batch) -> Batch:
    """What a step gets: each feature and label in the shape and dtype asked for, and the weight, by column name.

    Features that are stacked are one tensor, "features".
    """
    tensors = {
        name: tensor
        for specs in (spec.inputs, spec.labels)
        for name, tensor in zip(argument_names(specs), tensors_of(specs, batch), strict=True)
    }
    if (weights := weights_of(spec.sample_weight_col, batch)) is not None:
        tensors[str(spec.sample_weight_col)] = weights
    return tensors


class ValidationLoader:
    """All batches of a validation each time it is iterated."""

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
    """DDP over the process group that the runner has initialised.

    DDP and not hvd.DistributedOptimizer, which belongs to one optimizer whose every gradient comes once a step: modules
    of Lightning have several, toggle them, and clip, scale and accumulate within Lightning's own closure around
    ``step``. Lightning drives DDP through all of that; gradients are averaged over the same process group either way.

    ``factor`` gives that of the loss of this rank's present batch.
    """

    class Environment(pl.plugins.environments.ClusterEnvironment):  # type: ignore[misc] # Any
        """The ranks as the runner has placed them."""

        creates_processes_externally = True
        main_address, main_port = "", 0  # for init_process_group only, which has been called

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
        """A rank has one device, whatever its local rank."""

        @property
        def root_device(self) -> torch.device:
            return device

        def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
            """The mean over ranks is that over the rows of all."""
            share = factor()
            return super().backward(closure_loss if share == 1.0 else closure_loss * share, *args, **kwargs)

        def optimizer_step(
            self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
        ) -> Any:
            """LBFGS decides by the loss, too, how often to evaluate it: by that of the rows of all."""

            def everybodys() -> Any:
                loss = closure()
                return hvd.allreduce(loss.detach() * factor(), op=hvd.Average, name="spark_hvd.lightning.loss")

            decides = isinstance(optimizer, torch.optim.LBFGS) and hvd.size() > 1
            return super().optimizer_step(optimizer, everybodys if decides else closure, *args, **kwargs)

        def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            """What is kept in memory is kept on every rank."""
            if filepath == KEEP:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
            else:
                super().save_checkpoint(checkpoint, filepath, storage_options)

        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            """A mean of whole numbers is not a whole number.

            Lightning divides the mean of sums by the mean of counts of rows; in integers the latter would be cut off
            wherever one rank has a row more.
            """
            if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
                tensor = tensor.double()
            return super().reduce(tensor, group, reduce_op)

    return Strategy(
        cluster_environment=Environment(), checkpoint_io=checkpoint_io, find_unused_parameters=find_unused_parameters
    )


def make_checkpoint_io(pl: Any, given: dict[str, Any] | None) -> Any:
    """A CheckpointIO that keeps what is written to KEEP as ``kept``, and reads ``given`` from there."""

    class InMemory(pl.plugins.io.TorchCheckpointIO):  # type: ignore[misc] # Any
        """Files are files as ever."""

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
    """A checkpoint of Lightning without what lies beside it: weights, and hyperparameters, which the module has."""
    left_out = ("state_dict", "hyper_parameters", "hparams_name", "hparams_type")
    data = io.BytesIO()
    torch.save({key: value for key, value in checkpoint.items() if key not in left_out}, data)
    # As a tensor, whatever callbacks put into it: the weights beside it can be read without it.
    return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def from_bytes(data: torch.Tensor, run_id: str) -> dict[str, Any]:
    """The inverse of :func:`to_bytes`.

    Raises:
        CheckpointError: there is code in it, which is not run.
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
    """``value`` with ``change`` made to each text in it, within dicts, lists and tuples."""
    if isinstance(value, str):
        return change(value)
    if type(value) is dict:
        return {replaced(key, change): replaced(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(item, change) for item in value)
    return value
