"""Between two batches of Lightning's loop: where an epoch is saved, and where one that was cut off goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.lightning.parts import batch_dict
from spark_hvd.estimators.training.train import Job

_log = logging.getLogger(__name__)
Logged = dict[str, list[float]]
"""What was logged in an epoch so far, by Lightning's names: the value of each, and the rows that a mean is of."""


class TrainLoader:
    """Batches of one epoch each time it is iterated; ``len`` of them on every rank, with those done before.

    Args:
        job: The training.
        save: Called between two batches after which it saves, with how many were done. All that follows a batch is
            over then: callbacks, schedulers, a validation.

    Attributes:
        trainer: Whose loop takes the batches; to be set before it does.
        weights: Of a row of each batch that was given, see :class:`~spark_hvd.data.readers.feed.Feed`.
    """

    trainer: Any

    def __init__(self, job: Job, save: Callable[[int], None]) -> None:
        self._job, self._save = job, save
        self._cut_off, begun = len(job.history), job.partial_epoch
        self._begun = begun["step"] if begun else 0
        self._length = self._begun + job.steps_left(self._begun)
        self.weights: list[float] = []

    @property
    def begun(self) -> int:
        """Batches of the present epoch that were done before this fit."""
        return self._begun if self.trainer.current_epoch == self._cut_off else 0

    def __len__(self) -> int:
        return self._length if self.begun else self._job.steps

    def __iter__(self) -> Iterator[Batch]:
        # Nothing happens before the first batch is asked for: Lightning makes iterators that it does not use.
        job, begun = self._job, self.begun
        self.weights[:] = [1.0] * begun
        if begun:
            self._go_on(begun)
        for number in range(begun, len(self)):
            if number > begun and job.saves_after(number):
                self._save(number)
            # Lightning asks for the first batch before it begins the epoch.
            with nullcontext() if job.progress is None else job.progress.fetching():
                batch = batch_dict(job.spec, next(job.feed))
            self.weights.append(job.feed.weight)
            yield batch

    def _go_on(self, begun: int) -> None:
        """Have Lightning's loop, which has begun the epoch, count the batches that were done."""
        loop, fetcher = self.trainer.fit_loop.epoch_loop, self.trainer.fit_loop._data_fetcher
        counts = loop.batch_progress.current
        counts.load_state_dict(dict.fromkeys(counts.state_dict(), begun))
        fetcher.fetched = begun
        self._job.seed(self.trainer.current_epoch, begun)
        if begun == len(self):  # other ranks, more than the rows that are left: what follows the last batch is
            loop.batch_progress.is_last_batch = True
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            loop.on_advance_end(fetcher)


def not_begun(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of Lightning as if the epoch had not begun: its ways into the middle of one differ by version."""
    loop = state["loops"]["fit_loop"]
    for counts in loop["epoch_progress"].values():
        counts["ready"] = counts["started"] = counts["processed"]
    loop["epoch_loop.batch_progress"]["current"] = dict.fromkeys(loop["epoch_loop.batch_progress"]["current"], 0)
    return state


def logged(trainer: Any) -> Logged:
    """What this rank has logged in the epoch so far; objects of torchmetrics keep theirs."""
    found = trainer.fit_loop.epoch_loop._results.items()
    return {
        name: [float(each.value), float(getattr(each, "cumulated_batch_size", 0))]
        for name, each in found
        if each.is_tensor and each.meta.on_epoch
    }


def log_again(trainer: Any, before: list[Logged]) -> None:
    """Add what was logged ``before`` to what is there by the same names, and take it out."""
    for name, each in trainer.fit_loop.epoch_loop._results.items():
        for value, rows in [values.pop(name) for values in before if name in values]:
            was = each.value.new_tensor(value)
            if each.meta.is_mean_reduction:
                each.cumulated_batch_size = each.cumulated_batch_size + int(rows)
            extreme = each.meta.is_max_reduction or each.meta.is_min_reduction
            each.value = each.meta.reduce_fx(torch.stack([was, each.value])) if extreme else was + each.value
            each._computed = None  # a value that was asked for already


def mine(ranks: Sequence[Any]) -> Sequence[Any]:
    """The parts of an epoch's sums that this rank goes on with: its own, where ranks are as many as then."""
    return ranks[hvd.rank() :: hvd.size()]


def tell_unknown(job: Job) -> None:
    """Warn of a monitor that no epoch has, where one that was validated might have had it."""
    monitor = job.spec.monitor
    if hvd.rank() == 0 and job.awaits_validation and not any(monitor in (None, *row) for row in job.history):
        _log.warning(
            "monitor=%r: no epoch has it, for none was validated, and so none is the best. The history has %s. Give "
            "one of these, or have an epoch validated (check_val_every_n_epoch, limit_val_batches of trainer_args)",
            monitor,
            sorted({key for row in job.history for key in row}),
        )
