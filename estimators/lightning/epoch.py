"""Saves an epoch between two batches of Lightning's loop, and continues an interrupted one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.lightning.parts import batch_dict
from spark_hvd.estimators.training.train import Job

_log = logging.getLogger(__name__)
Logged = dict[str, list[float]]
"""Values logged in an epoch so far, by Lightning's names: each value, and the number of rows of a mean."""
_OTHERS = "spark_hvd.others."
"""Begins the name of the hook under which a value is shown on a rank that has not logged it."""


class TrainLoader:
    """The batches of one epoch at each iteration. ``len`` counts them, including those done before, on every rank.

    Args:
        job: The training.
        save: Called with the number of batches done, between two batches where a checkpoint is due. By then, everything
            that follows a batch is over: callbacks, schedulers, a validation.

    Attributes:
        trainer: The trainer whose loop takes the batches; set it before that.
        weights: Row weight of each batch yielded, see :class:`~spark_hvd.data.readers.feed.Feed`.
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
        # Do nothing before the first batch is requested: Lightning creates iterators that it does not use.
        job, begun = self._job, self.begun
        self.weights[:] = [1.0] * begun
        if begun:
            self._resume(begun)
        for number in range(begun, len(self)):
            if number > begun and job.saves_after(number):
                self._save(number)
            # Lightning requests the first batch before it begins the epoch.
            with nullcontext() if job.progress is None else job.progress.fetching():
                batch = batch_dict(job.spec, next(job.feed))
            self.weights.append(job.feed.weight)
            yield batch

    def _resume(self, begun: int) -> None:
        """Make Lightning's loop, which has begun the epoch, count the batches that were done before."""
        loop, fetcher = self.trainer.fit_loop.epoch_loop, self.trainer.fit_loop._data_fetcher
        counts = loop.batch_progress.current
        counts.load_state_dict(dict.fromkeys(counts.state_dict(), begun))
        fetcher.fetched = begun
        self._job.seed(self.trainer.current_epoch, begun)
        if begun == len(self):  # more ranks than rows are left: only what follows the last batch remains
            loop.batch_progress.is_last_batch = True
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            loop.on_advance_end(fetcher)


def not_begun(state: dict[str, Any]) -> dict[str, Any]:
    """Reset a Lightning checkpoint to the start of its epoch: ways into the middle of one differ between versions."""
    loop = state["loops"]["fit_loop"]
    for counts in loop["epoch_progress"].values():
        counts["ready"] = counts["started"] = counts["processed"]
    loop["epoch_loop.batch_progress"]["current"] = dict.fromkeys(loop["epoch_loop.batch_progress"]["current"], 0)
    return state


def logged(trainer: Any) -> Logged:
    """Return what this rank has logged in the epoch so far; torchmetrics objects keep their own values."""
    found = trainer.fit_loop.epoch_loop._results.items()
    return {
        name: [float(each.value), float(getattr(each, "cumulated_batch_size", 0))]
        for name, each in found
        if each.is_tensor and each.meta.on_epoch
    }


def log_again(trainer: Any, before: list[Logged]) -> None:
    """Merge what was logged ``before`` into the present values of the same names, and remove it there."""
    for name, each in trainer.fit_loop.epoch_loop._results.items():
        for value, rows in [values.pop(name) for values in before if name in values]:
            was = each.value.new_tensor(value)
            if each.meta.is_mean_reduction:
                each.cumulated_batch_size = each.cumulated_batch_size + int(rows)
            extreme = each.meta.is_max_reduction or each.meta.is_min_reduction
            each.value = each.meta.reduce_fx(torch.stack([was, each.value])) if extreme else was + each.value
            each._computed = None  # drop a cached value


def share(trainer: Any, shared: dict[str, torch.Tensor]) -> None:
    """Make the epoch's means, extremes and sums those of all ranks, as one process would have logged them; collective.

    Callbacks, schedulers and loggers then decide alike on every rank, also on one that has not logged a value itself.
    What was logged with ``sync_dist``, and the objects of torchmetrics, are so already. ``shared`` keeps the results,
    so that each is computed once.
    """
    results = trainer._results
    found = {
        key: each
        for key, each in results.items()
        if each.is_tensor and each.meta.on_epoch and not each.has_reset and not each.meta.sync.should
        if not each.meta.fx.startswith(_OTHERS) and (each._computed is None or each._computed is not shared.get(key))
    }
    ranks = hvd.allgather_object({key: _part(each) for key, each in found.items()}, name="spark_hvd.lightning.logged")
    for key in dict.fromkeys(key for rank in ranks for key in rank):
        of_ranks = [rank[key] for rank in ranks if key in rank]
        value, about = _together(of_ranks), of_ranks[0]
        if key in found:
            found[key]._computed = shared[key] = value.to(found[key].value.device)
        elif not about["rank_zero_only"] and (key not in results or results[key].has_reset):
            for name in {about["name"], about["forked_name"]}:
                show = {each: about[each] and name == about["forked_name"] for each in ("logger", "prog_bar")}
                results.log(_OTHERS + key, name, value.to(trainer.strategy.root_device), batch_size=1, **show)
    _ = trainer.callback_metrics, trainer.logged_metrics  # which keep what they show


def _part(each: Any) -> dict[str, Any]:
    """Return this rank's part of a logged value, and how Lightning shows it."""
    meta = each.meta
    return {
        "value": float(each.value),
        "rows": float(getattr(each, "cumulated_batch_size", 1)),
        "dtype": each.value.dtype,
        "kind": meta.reduce_fx.__name__,
        "name": meta.name,
        "forked_name": meta.forked_name(on_step=False),
        "logger": meta.logger,
        "prog_bar": meta.prog_bar,
        "rank_zero_only": meta.sync.rank_zero_only,
    }


def _together(of_ranks: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Return the mean, extreme or sum of the ranks' parts."""
    values, rows = torch.tensor(
        [(part["value"], part["rows"]) for part in of_ranks], dtype=torch.float64, device="cpu"
    ).unbind(1)
    kind = of_ranks[0]["kind"]
    if kind in ("max", "min"):
        value = values.amax() if kind == "max" else values.amin()
    else:
        value = values.sum() / (rows.sum() if kind == "mean" else 1)
    return value.to(of_ranks[0]["dtype"])


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return an epoch's metrics; what was logged both on step and on epoch appears once, as the epoch's mean."""
    twice = {
        f"{name}_{when}"
        for name in metrics
        for when in ("step", "epoch")
        if f"{name}_step" in metrics and f"{name}_epoch" in metrics
    }
    return {name: float(value) for name, value in metrics.items() if name not in twice}


def means(ranks: Sequence[Mapping[str, float]], rows: Sequence[int]) -> dict[str, float]:
    """Average over the ranks that have a metric, weighted by their rows; only what is logged on step alone differs."""
    found = {}
    for name in dict.fromkeys(name for metrics in ranks for name in metrics):
        values = [(metrics[name], count) for metrics, count in zip(ranks, rows, strict=True) if name in metrics]
        total = sum(count for _, count in values)
        if len({value for value, _ in values}) == 1 or not total:
            found[name] = values[0][0]
        else:
            found[name] = sum(value * count for value, count in values) / total
    return found


def mine(ranks: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of an epoch's sums for this rank: its own, if the number of ranks is the same."""
    return ranks[hvd.rank() :: hvd.size()]


def warn_unknown_monitor(job: Job) -> None:
    """Warn about a monitor that no epoch has, if a validated epoch might have had it."""
    monitor = job.spec.monitor
    if hvd.rank() == 0 and job.awaits_validation and not any(monitor in (None, *row) for row in job.history):
        _log.warning(
            "monitor=%r: no epoch has it, because none was validated, so none is the best. The history has %s. Choose "
            "one of these, or validate an epoch (check_val_every_n_epoch, limit_val_batches of trainer_args)",
            monitor,
            sorted({key for row in job.history for key in row}),
        )


def step_monitors(trainer: Any) -> set[str]:
    """Return what schedulers with interval "step" monitor."""
    return {each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau and each.interval == "step"}


def warn_monitor_of_one_rank(trainer: Any, monitors: set[str]) -> set[str]:
    """Warn about those ``monitors`` that each rank has logged for itself in this step, and return the others."""
    own = {
        name
        for each in trainer._results.values()
        if each.meta.on_step and not (each.meta.sync.should if each.is_tensor else each.value.dist_sync_on_step)
        for name in (each.meta.name, each.meta.forked_name(on_step=True))
    }
    for name in sorted(monitors & own):
        _log.warning(
            "a ReduceLROnPlateau with interval 'step' monitors %r, which is each rank's own value after a step, so "
            "that learning rates, and then weights, may differ between ranks. Log it with sync_dist=True (a metric of "
            "torchmetrics: dist_sync_on_step=True), or monitor a value of the epoch",
            name,
        )
    return monitors - own
