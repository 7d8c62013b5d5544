"""What every rank does around a training loop: same weights, my data, checkpoints, the history; any framework."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

import spark_hvd.torch as hvd
from spark_hvd.estimators.checkpoint import BEST, LAST, Checkpoints, check_fits
from spark_hvd.estimators.errors import NotFiniteLossError
from spark_hvd.estimators.history import History
from spark_hvd.estimators.reader import Batch, Reader, ReaderSpec, open_reader
from spark_hvd.estimators.spec import Objects, TrainSpec

if TYPE_CHECKING:
    from spark_hvd.estimators.modules import PackedModule


NAN_CHECK_EVERY = 16
"""Batches between looks at the loss on a GPU, where each look waits for it."""


class Framework(Protocol):
    """A way to train: one for each framework, so that no estimator is written twice."""

    def fit(self, job: Job) -> History:
        """Train on this rank, together with the others.

        Epochs ``len(job.history)`` to ``spec.epochs`` are to be done; ``job.keep`` is to be called after each.
        """
        ...


@dataclass
class Job:
    """A training as it stands in one rank.

    Attributes:
        spec: What was asked for.
        objects: The model and the code around it, this rank's own; weights are those of the checkpoint when resuming.
        device: Where to train.
        resumed: The checkpoint to go on from.
        history: Rows of the epochs done.
        checkpoints: Of the run.
        train: Reads this rank's share.
        validation: The same for validation.
    """

    spec: TrainSpec
    objects: Objects
    device: torch.device
    resumed: dict[str, Any] | None
    history: History
    checkpoints: Checkpoints
    train: Reader
    validation: Reader | None

    @property
    def steps(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return self.spec.epoch_steps(hvd.size())

    def train_batches(self, first_epoch: int) -> Iterator[Batch]:
        """Endless batches from where ``first_epoch`` begins: pass after pass over the data."""
        number, skipped = divmod(first_epoch * self.steps, self.spec.pass_steps(hvd.size()))
        passes = itertools.count(number)
        return itertools.islice(itertools.chain.from_iterable(map(self.train.batches, passes)), skipped, None)

    def validation_batches(self) -> Iterator[Batch]:
        """The batches of one validation."""
        assert self.validation is not None
        return itertools.islice(self.validation.batches(0), self.spec.val_steps)

    def seed(self, epoch: int) -> None:
        """Set torch's seed for an epoch: another on each rank, the same whether the run was resumed or not."""
        seed = (self.spec.seed * 1_000_003 + epoch) * 65_537 + hvd.rank()
        torch.manual_seed(seed % 2**63)  # more is too much for torch

    def keep(self, model: torch.nn.Module, rest: Callable[[], dict[str, Any]]) -> None:
        """Write the checkpoint of an epoch, whose row is the last of ``history``; on rank 0.

        Args:
            model: Its weights.
            rest: Gives the state of optimizer and scheduler, as plain data and tensors.
        """
        if hvd.rank() != 0:
            return
        key = self.spec.monitor or ("val_loss" if "val_loss" in self.history[-1] else "loss")
        if key not in self.history[-1] and self.spec.monitor:
            raise ValueError(f"monitor={key!r}: expected one of {sorted(self.history[-1])}")
        plain = {"history": [dict(row) for row in self.history], "size": hvd.size(), "seed": self.spec.seed}
        state = {"model": model.state_dict(), **rest(), **plain}
        # Without a loss, which a LightningModule may not report, no epoch is the best.
        if key in self.history[-1] and self.history.best(key, self.spec.monitor_mode) is self.history[-1]:
            self.checkpoints.save({"model": state["model"], **plain}, BEST)
        self.checkpoints.save(state, LAST)

    def report(self) -> None:
        """Print the last row of the history, on rank 0."""
        if hvd.rank() == 0 and self.spec.verbose:
            row = self.history[-1]
            values = [f"{key} {_short(value)}" for key, value in row.items() if key not in ("epoch", "seconds")]
            print(f"epoch {row['epoch']}/{self.spec.epochs}  {row['seconds']:.1f} s  {'  '.join(values)}", flush=True)


def train(spec: TrainSpec, packed: PackedModule, framework: Framework) -> History | None:
    """Run on every rank: train, and return the history on rank 0."""
    from spark_hvd.estimators.modules import unpack

    hvd.init()
    torch.manual_seed(spec.seed)
    objects: Objects = unpack(packed)
    device = _device(spec.use_gpu)
    checkpoints = Checkpoints(spec.store, spec.run_id)
    resumed = checkpoints.load() if spec.resume else None
    if resumed is not None:
        check_fits(resumed, objects.model, spec.run_id)
        objects.model.load_state_dict(resumed["model"])
    history = History(resumed["history"]) if resumed else History()
    with ExitStack() as cleanup:
        shared = {key: value for key, value in spec.reader.items() if key != "kind"}
        common: dict[str, Any] = {
            **shared,
            **objects.reader,
            "columns": spec.columns,
            "store": spec.store,
            "seed": spec.seed,
            "rank": hvd.rank(),
            "size": hvd.size(),
        }
        reader = ReaderSpec(**common, dataset=spec.train, batch_size=spec.batch_size, shuffle=spec.shuffle)
        train_reader = cleanup.enter_context(closing(open_reader(reader, spec.reader.get("kind"))))
        val_reader = None
        if spec.validation is not None:
            common.update(workers=spec.val_workers, drop_last=False)
            validation = ReaderSpec(**common, dataset=spec.validation, batch_size=spec.val_batch_size)
            val_reader = cleanup.enter_context(closing(open_reader(validation, spec.reader.get("kind"))))
        job = Job(spec, objects, device, resumed, history, checkpoints, train_reader, val_reader)
        history = framework.fit(job)
    return history if hvd.rank() == 0 else None


def not_finite(loss: float, epoch: int, batch: int, steps: int) -> NotFiniteLossError:
    """The error of a loss that is NaN or infinite."""
    return NotFiniteLossError(
        f"the loss is {loss} on rank {hvd.rank()} in epoch {epoch + 1}, batch {batch + 1} of {steps}. Look for a "
        "learning rate that is too high (TorchEstimator's scale_lr multiplies it by num_proc), values that are not "
        "scaled, a log or division in the loss, gradients that want clipping; terminate_on_nan=False goes on"
    )


def speed(seconds: float, rows: float) -> dict[str, float]:
    """For the history: how long the training of an epoch took, and the rows of all ranks a second."""
    return {"seconds": round(seconds, 3), "rows_per_second": round(rows / max(seconds, 1e-9), 1)}


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _device(use_gpu: bool) -> torch.device:
    # The runner has made the GPU that this rank may use the current one.
    if use_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
