"""What every rank does around a training loop of any framework: weights, data, checkpoints, history."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

import spark_hvd.torch as hvd
from spark_hvd.checkpoint.format import on_rank_0
from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.reader import Batch
from spark_hvd.data.readers.sharding import Position
from spark_hvd.estimators.errors import NotFiniteLossError
from spark_hvd.estimators.training.background_validation import ValidationClient, ValidationFolder
from spark_hvd.estimators.training.checkpoint import BEST, LAST, TRAINED, Checkpoints, check_fits, digest_of, of_epoch
from spark_hvd.estimators.training.elastic import FitState
from spark_hvd.estimators.training.history import History, Row, monitored
from spark_hvd.estimators.training.order import PARTIAL_EPOCH, check_order, order_of, position_of
from spark_hvd.estimators.training.rows import Rows, check_batches, reader_spec, rows_of, validation_rows
from spark_hvd.estimators.training.spec import Objects, TrainSpec
from spark_hvd.scratch import Scratch
from spark_hvd.store import Store
from spark_hvd.transport.torch_private import with_versions
from spark_hvd.world.activity import activity

if TYPE_CHECKING:
    from spark_hvd.estimators.training.packing import PackedModule

NAN_CHECK_EVERY = 16
"""Batches between checks of the loss on a GPU, where each check waits for it."""
_STOPPED = "stopped"
"""Key in commits only: a run that resumes from a checkpoint in a store may have other callbacks."""


class Framework(Protocol):
    """The training loop of a framework."""

    def fit(self, job: Job) -> History:
        """Train on this rank, together with the others.

        Call ``job.begin`` once the checkpoint is known to fit. Do epochs ``len(job.history)`` to ``spec.epochs``, the
        first from ``job.partial_epoch`` on. Call ``job.save`` as the last action of each epoch, because ranks may
        change there, and ``job.finish`` at the very end.
        """


class Validates(Framework, Protocol):
    """A framework that can also validate a checkpoint in the background."""

    def validate(self, job: Job, ranks: int) -> dict[str, float]:
        """Validate the job's model on these ranks together, as that number of training ranks would.

        Returns:
            Losses and metrics as in the history, on all ranks.
        """
        ...


@dataclass
class Job:
    """The state of a training in one rank.

    Attributes:
        objects: This rank's model and the code around it. When resuming, the weights are those of the checkpoint.
        resumed: The checkpoint to resume from.
        history: Rows of the finished epochs.
        rows: Rows to train on; ``feed`` yields them.
        validation: Rows to validate on.
        state: State of an elastic fit; otherwise None.
        background_validation: Validation in the background; None if the ranks validate.
        progress: The loop over this epoch's batches, for displays.
        delayed_rows: Rows of earlier epochs whose validation arrived since the previous epoch.
        awaits_validation: Whether no epoch has been validated yet, if not every epoch is (Lightning).
    """

    spec: TrainSpec
    objects: Objects
    device: torch.device
    resumed: dict[str, Any] | None
    history: History
    checkpoints: Checkpoints
    rows: Rows
    feed: Feed[Batch]
    validation: Rows | None
    state: FitState | None = None
    background_validation: ValidationClient | None = None
    progress: hvd.Progress[Batch] | None = None
    delayed_rows: list[Row] = field(default_factory=list)
    awaits_validation: bool = False
    _saved: str | None = None  # digest of the weights in the last epoch's checkpoint

    @property
    def steps(self) -> int:
        """Number of batches in an epoch, the same on every rank."""
        return self.spec.train_steps_per_epoch or self.rows.steps

    @property
    def validation_steps(self) -> int:
        """Number of batches in a validation, the same on every rank."""
        assert self.validation is not None
        return min(self.validation.steps, self.spec.validation_steps_per_epoch or self.validation.steps)

    @property
    def validates(self) -> bool:
        """Whether the ranks validate the current epoch; they always validate the last one."""
        return self.validation is not None and (
            self.background_validation is None or len(self.history) + 1 >= self.spec.epochs
        )

    @property
    def partial_epoch(self) -> dict[str, Any] | None:
        """State of an interrupted epoch in the checkpoint, as passed to :meth:`save`."""
        return self.resumed[PARTIAL_EPOCH] if self.resumed else None

    @property
    def stopped(self) -> bool:
        """Whether callbacks had ended the training when the ranks changed."""
        return bool(self.resumed and self.resumed.get(_STOPPED))

    @property
    def warns(self) -> bool:
        """Whether this rank warns of what the checkpoint overrides: rank 0 does, unless the fit itself wrote it."""
        return self.resumed is not None and hvd.rank() == 0 and not self.checkpoints.is_owner

    def begin(self) -> None:
        """Make this fit the one that writes the run's files, before the first epoch.

        Raises:
            StoreError: Another fit has begun since the driver read the checkpoint, or the store fails.
        """
        if hvd.rank() != 0:
            return
        self.checkpoints.check_owner(self.spec.former_fit)
        if self.background_validation is not None and not self.checkpoints.is_owner:
            self.background_validation.begin()  # before the claim, from which on the driver looks for checkpoints
        self.checkpoints.claim()
        if len(self.history) < self.spec.epochs and not self.stopped:
            self.checkpoints.discard(TRAINED)  # left by the fit from which this one continues

    def lowest(self, label: str) -> float | None:
        """Return the lowest value of a label in the training and validation data; None if it is unknown."""
        sets = [self.rows.columns, *([] if self.validation is None else [self.validation.columns])]
        found = [column.lowest for columns in sets for column in columns if column.name == label]
        known = [each for each in found if each is not None]
        return min(known) if len(known) == len(sets) else None

    def saves_after(self, step: int) -> bool:
        """Return whether to call :meth:`save` within an epoch, after this number of its batches."""
        return any(every and step % every == 0 for every in (self.spec.checkpoint_every, self.spec.commit_every))

    def steps_left(self, done: int) -> int:
        """Return the epoch's remaining batches per rank after ``done``; call it when the epoch begins or resumes."""
        if self.spec.train_steps_per_epoch:
            return self.spec.train_steps_per_epoch - done
        if not done:
            return self.steps
        assert self.resumed is not None
        # Not the feed's: with other ranks, its pass may be complete, and it is at the next one.
        position = Position.from_json(self.resumed["position"])
        return len(self.feed.sharding.batches(position, hvd.rank(), hvd.size()))

    def validation_batches(self, rank: int | None = None, size: int | None = None) -> Iterator[Batch]:
        """Return the batches of one validation, of this rank or of one of ``size`` ranks."""
        assert self.validation is not None
        rank, size = hvd.rank() if rank is None else rank, size or hvd.size()
        batches = itertools.islice(self.validation.first_epoch(rank, size), self.spec.validation_steps_per_epoch)
        where: dict[str, Any] = {"epoch": len(self.history), "epochs": self.spec.epochs, "stage": "validation"}
        return iter(hvd.progress(batches, total=self.validation_steps, **where))

    def seed(self, epoch: int, done: int = 0) -> None:
        """Set torch's seed for an epoch, or its rest after ``done`` batches; it differs by rank.

        It does not depend on whether the run was resumed.
        """
        seed = (self.spec.seed * 1_000_003 + epoch) * 65_537 + hvd.rank() + done * 2_147_483_647
        torch.manual_seed(seed % 2**63)  # torch accepts no more bits

    def add(self, means: Mapping[str, float], **rest: float) -> None:
        """Append the row of an epoch to the history, and report its means to displays. Call it before callbacks.

        ``means`` are losses and metrics over the rows of all ranks; ``rest`` has the other entries of the row.

        Raises:
            StoreError: Another fit has begun to train this run: callbacks must not replace its files.
        """
        if hvd.rank() == 0:
            self.checkpoints.check_owner()
        if self.background_validation is not None:
            self.collect(wait=self.validates)
        restarts = {"restarts": hvd.generation()} if hvd.generation() else {}
        epoch = {"epoch": len(self.history) + 1}
        self.history.append({**epoch, **means, **rest, **restarts, **epoch})  # a module may log one of these names
        if hvd.rank() == 0:
            activity.add_epoch(dict(self.history[-1]))
        if self.progress is not None:
            activity.progress = self.progress  # a finished validation would report them as its own
            self.progress.report(**means)

    def collect(self, *, wait: bool) -> None:
        """Add results of validation in the background to the history, on all ranks.

        With ``wait``, wait for a running validation; by then, ranks have requested the end.
        """
        assert self.background_validation is not None
        self.delayed_rows = []
        for row in self.background_validation.collect(self.history, wait=wait):
            self.delayed_rows.append(self.history[int(row["epoch"]) - 1])
            if hvd.rank() == 0:
                activity.add_epoch(row)
                self._print(row, "(validated in the background)")

    def validated(self, means: Mapping[str, float]) -> None:
        """Add a validation to the last epoch's row; ranks made it after the training was stopped."""
        self.collect(wait=True)
        self.history[-1].update(means)
        if hvd.rank() == 0:
            activity.add_epoch({"epoch": self.history[-1]["epoch"], **means})

    def save(
        self,
        weights: Mapping[str, Any],
        rest: Callable[[], dict[str, Any]],
        partial_epoch: Mapping[str, Any] | None = None,
        stop: bool = False,
    ) -> None:
        """Write a checkpoint on rank 0, after an epoch, whose row is the last of ``history``, or within one.

        It is copied here, and written while training continues. In an elastic fit, all ranks also commit it, and may
        leave here and continue from it. ``partial_epoch`` has the state to resume an epoch from; its "step" is the
        number of batches done. ``stop`` marks the last checkpoint.

        Raises:
            HostsUpdatedInterrupt: the ranks of an elastic fit are about to change; leave it to the caller of ``fit``.
        """
        every = self.spec.checkpoint_every
        stores = hvd.rank() == 0 and (partial_epoch is None or bool(every and partial_epoch["step"] % every == 0))
        if not stores and self.state is None:
            return
        common = {
            "model": weights,
            "history": [dict(row) for row in self.history],
            "size": hvd.size(),
            "seed": self.spec.seed,
            "derived": dict(self.spec.derived),
            "position": self.feed.position.to_json(),
            "order": order_of(self.spec, self.rows.sharding.rows, self.rows.layout),
        }
        content = {**common, **rest(), PARTIAL_EPOCH: partial_epoch}
        done = partial_epoch is None and (stop or len(self.history) >= self.spec.epochs)
        if stores:
            states: dict[str, Mapping[str, Any]] = {}
            if partial_epoch is None:
                key = self._monitored()
                # Without a loss, which a LightningModule need not report, or with NaN, no epoch is the best.
                known = not math.isnan(self.history[-1].get(key, math.nan))
                if known and self.history.best(key, self.spec.monitor_mode) is self.history[-1]:
                    states[BEST] = common
                if self.spec.keeps_epochs:
                    states[of_epoch(len(self.history))] = common
            states[LAST] = content
            superseded: Callable[[], Iterable[str]] = tuple
            if self.background_validation is not None and partial_epoch is None and not done:
                request = self.background_validation.request(len(self.history))
                states[request.name], superseded = common, partial(self.background_validation.superseded, request)
            self.checkpoints.save(states, superseded)
            if done:
                self._saved = digest_of(weights)
            if self.state is not None and (done or BEST in states):
                self.checkpoints.finish()
        if self.state is not None:
            if partial_epoch is None:
                hvd.barrier()  # ranks that continue without rank 0 will not write these checkpoints
            self.state.put({**content, _STOPPED: stop}, done)

    def _monitored(self) -> str:
        """Return the key of the history that determines the best epoch.

        Raises:
            ValueError: The history should have this key by now, but does not.
        """
        known = {key: value for row in self.history for key, value in row.items()}
        if self.spec.monitor is not None and self.awaits_validation:
            return self.spec.monitor
        return monitored(known, self.spec.monitor, in_background=self.background_validation is not None)

    def finish(self, weights: Mapping[str, Any]) -> None:
        """Make ``weights``, as callbacks and the framework left them, the weights of the trained model.

        Call it after the training and its last callbacks.
        """
        left = sum("val_loss" not in row for row in self.history)
        if hvd.rank() == 0 and self.background_validation is not None and left and self.spec.verbose:
            why = "newer checkpoints replaced theirs, no slot was free, or their validation failed"
            print(f"{left} of {len(self.history)} epochs were not validated: {why}", flush=True)
        if hvd.rank() == 0 and self._saved is not None and digest_of(weights) != self._saved:
            history = [dict(row) for row in self.history]
            self.checkpoints.save({TRAINED: {"model": weights, "history": history, "size": hvd.size()}})

    def report(self) -> None:
        """Print the last row of the history, on rank 0."""
        if hvd.rank() == 0:
            self._print(self.history[-1])

    def _print(self, row: Row, *more: str) -> None:
        if self.spec.verbose:
            values = [f"{key} {_short(value)}" for key, value in row.items() if key not in ("epoch", "seconds")]
            seconds = [f"{row['seconds']:.1f} s"] if "seconds" in row else []
            fit = f"{self.spec.label}: " if self.spec.label else ""
            print(f"{fit}epoch {row['epoch']}/{self.spec.epochs}", *seconds, *values, *more, sep="  ", flush=True)


def train(spec: TrainSpec, packed: PackedModule, framework: Framework) -> tuple[History, dict[str, Any] | None] | None:
    """Train on this rank; rank 0 returns the history, with the checkpoint if ``returns_state``."""
    with ExitStack() as cleanup:
        if spec.returns_state:
            spec = replace(spec, store=Store.create(cleanup.enter_context(Scratch("fit"))))
        if spec.elastic:
            history = hvd.elastic.run(lambda state: _train(spec, packed, framework, state))(FitState())
        else:
            history = _train(spec, packed, framework)
        if hvd.rank() != 0:
            return None
        if not spec.returns_state:
            return history, None
        return history, Checkpoints(spec.store, spec.run_id).trained(spec.restore_best_weights)


def _train(spec: TrainSpec, packed: PackedModule, framework: Framework, state: FitState | None = None) -> History:
    from spark_hvd.estimators.training.packing import unpack

    hvd.init()
    torch.manual_seed(spec.seed)
    objects: Objects = unpack(packed)
    device = spec.device
    checkpoints = Checkpoints(spec.store, spec.run_id, spec.fit_id)
    resumed = None if state is None else state.content
    if resumed is not None:
        objects.model.load_state_dict(with_versions(resumed["model"], objects.model))
    # There may be none yet; or another fit, which was still going, has written it since the driver looked.
    elif (spec.resume or hvd.generation() > 0) and on_rank_0(checkpoints.exists):
        resumed = checkpoints.load()
        check_fits(resumed, objects.model, spec.run_id, spec.derived)
        objects.model.load_state_dict(resumed["model"])
        spec = spec.for_rest(resumed)
    history = History(resumed["history"]) if resumed else History()
    with ExitStack() as cleanup:
        reader = reader_spec(spec, objects, dataset=spec.train, shuffle=spec.shuffle, seed=spec.seed)
        rows = rows_of("training", reader, spec.batch_size, spec.drop_last, spec.uses)
        cleanup.enter_context(closing(rows.reader))
        if spec.needs_two_rows is not None:
            check_batches(spec.needs_two_rows, spec, rows.sharding)
        order = order_of(spec, rows.sharding.rows, rows.layout)
        if resumed is not None:
            check_order(resumed, order, spec.run_id)
        feed = Feed(rows.reader, rows.sharding, hvd.rank(), hvd.size(), position_of(order, resumed))
        validation = None
        if spec.validation is not None:
            validation = validation_rows(spec, objects)
            cleanup.enter_context(closing(validation.reader))
        client = None
        if validation is not None and spec.validation_in_background:
            client = ValidationClient(ValidationFolder(spec.store, spec.run_id, spec.fit_id), bool(spec.verbose))
        job = Job(spec, objects, device, resumed, history, checkpoints, rows, feed, validation, state, client)
        history = framework.fit(job)
        checkpoints.finish()
        return history


def not_finite(
    spec: TrainSpec, loss: float, epoch: int, batch: int, steps: int, tensors: Mapping[str, torch.Tensor]
) -> NotFiniteLossError:
    """Return the error for a loss that is NaN or infinite; ``tensors`` are the columns of the batch."""
    where = f"the loss is {loss} on rank {hvd.rank()} in epoch {epoch + 1}, batch {batch + 1} of {steps}"
    if found := spec.not_finite(tensors):
        return NotFiniteLossError(f"{where}, whose {found}")
    return NotFiniteLossError(
        f"{where}. Look for a learning rate that is too high (TorchEstimator's scale_lr multiplies it by num_proc), "
        "values that are not scaled, a log or division in the loss, and gradients that need clipping. "
        "terminate_on_nan=False continues anyway"
    )


def speed(seconds: float, rows: float) -> dict[str, float]:
    """Return entries of the history: seconds of training in an epoch, and rows per second of all ranks."""
    return {"seconds": round(seconds, 3), "rows_per_second": round(rows / max(seconds, 1e-9), 1)}


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
