"""The ranks of a run that validates a checkpoint in the background."""

from __future__ import annotations

import math
from contextlib import closing
from typing import TYPE_CHECKING

import torch

import spark_hvd.torch as hvd
from spark_hvd.checkpoint.format import Found, read_by_rank_0
from spark_hvd.data.readers.feed import Feed
from spark_hvd.data.readers.sharding import Position
from spark_hvd.estimators.training.background_validation import Results, ValidationFolder, ValidationRequest
from spark_hvd.estimators.training.checkpoint import BEST, Checkpoints
from spark_hvd.estimators.training.history import History, monitored
from spark_hvd.estimators.training.rows import validation_rows
from spark_hvd.estimators.training.spec import Objects, TrainSpec
from spark_hvd.estimators.training.train import Job, Validates
from spark_hvd.store.errors import StoreError

if TYPE_CHECKING:
    from spark_hvd.estimators.training.packing import PackedModule


def validate(
    spec: TrainSpec, packed: PackedModule, framework: Validates, results: Results
) -> tuple[ValidationRequest, dict[str, float]] | None:
    """Validate the newest waiting checkpoint, and make it the best one if its validation says so.

    Returns:
        The request, and losses and metrics as in the history; None if no checkpoint waits any more.
    """
    from spark_hvd.estimators.training.packing import unpack

    hvd.init()
    torch.manual_seed(spec.seed)  # as in training: losses may use random numbers
    taken: list[tuple[ValidationRequest, Found]] = []
    state = read_by_rank_0(lambda: _take(spec, taken))
    if state is None:
        return None
    objects: Objects = unpack(packed)
    objects.model.load_state_dict(state["model"])
    rows = validation_rows(spec, objects)
    checkpoints = Checkpoints(spec.store, spec.run_id, spec.fit_id)
    history = History(state["history"])
    with closing(rows.reader):
        feed = Feed(rows.reader, rows.sharding, hvd.rank(), hvd.size(), Position())
        job = Job(spec, objects, spec.device, None, History(history[:-1]), checkpoints, rows, feed, rows)
        means = framework.validate(job, int(state["size"]))
    if hvd.rank() == 0:
        ((request, found),) = taken
        key = monitored({**history[-1], **means}, spec.monitor)
        sign = 1.0 if spec.monitor_mode == "min" else -1.0
        if not math.isnan(means.get(key, math.nan)):  # otherwise rank 0 of the training determines the best
            former = results.best(key, sign, History(history[:-1]))
            if former is None or sign * means[key] < former:
                checkpoints.check_owner()
                spec.store.write_bytes(spec.store.checkpoint_path(spec.run_id, BEST), found.data)
        return request, means
    return None


def _take(spec: TrainSpec, taken: list[tuple[ValidationRequest, Found]]) -> Found | None:
    """Read the newest waiting checkpoint. It may be deleted meanwhile, if a newer one arrives."""
    folder, checkpoints = ValidationFolder(spec.store, spec.run_id), Checkpoints(spec.store, spec.run_id)
    while waiting := folder.waiting():
        try:
            found = checkpoints.read(waiting[-1].name)
        except StoreError:
            if waiting[-1] in folder.waiting():
                raise
            continue
        taken.append((waiting[-1], found))
        return found
    return None
