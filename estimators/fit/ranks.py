"""The last stage of a fit: ranks train, unless an earlier fit with the same run_id has already finished."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.errors import EstimatorError
from spark_hvd.estimators.fit.backend import SparkBackend, max_num_proc_of
from spark_hvd.estimators.fit.background_validator import BackgroundValidator
from spark_hvd.estimators.fit.plan import FitPlan
from spark_hvd.estimators.training.background_validation import Results, ValidationFolder, ValidationRequest
from spark_hvd.estimators.training.checkpoint import Checkpoints, check_fits
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.order import check_order, order_of
from spark_hvd.estimators.training.packing import PackedModule, pack
from spark_hvd.estimators.training.rows import too_few
from spark_hvd.estimators.training.spec import TrainSpec
from spark_hvd.estimators.training.train import Framework, train
from spark_hvd.estimators.training.validating import validate
from spark_hvd.runner.outcome.errors import ElasticError, ExecutorLostError, RankFailedError, StateLostError
from spark_hvd.runner.outcome.payload import renamed
from spark_hvd.runner.watch.tracking import Tracker
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError

_log = logging.getLogger(__name__)


_running: set[tuple[str, str]] = set()
"""Store and run_id of each fit of this process."""
_lock = threading.Lock()


@contextmanager
def only_fit_of(store: Store, run_id: str) -> Iterator[None]:
    """Refuse a second fit of the same run while the block runs: both would write, and then take, one checkpoint.

    Raises:
        ValueError: Another fit of this process is in such a block.
    """
    key = store.url, run_id
    with _lock:
        if key in _running:
            raise ValueError(
                f"run_id={run_id!r} is being trained by another fit of this program: both would write the same "
                "checkpoints. Wait until it has ended, or pass another run_id"
            )
        _running.add(key)
    try:
        yield
    finally:
        with _lock:
            _running.discard(key)


def train_on_ranks(
    plan: FitPlan,
    spec: TrainSpec,
    num_proc: int,
    framework: Framework,
    rows: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], History]:
    """Train, and return the checkpoint of the trained model and the history.

    Raises:
        DataError: There are fewer rows than ranks.
        CheckpointError: The run has a checkpoint that does not match.
        RunError: Ranks failed.
    """
    most = max(num_proc, max_num_proc_of(plan.backend) or 0)
    for what, data in (("training", spec.train), ("validation", spec.validation)):
        if rows is None and data is not None and data.rows < most:
            raise DataError(too_few(data.rows, what, most))
    checkpoints = Checkpoints(plan.store, spec.run_id, spec.fit_id)
    former = checkpoints.owner()  # before the checkpoint is read, so that one of a fit that begins meanwhile is noticed
    spec = replace(spec, former_fit=former, resume=plan.settings["run_id"] is not None)
    if not spec.returns_state:
        plan.store.check_writable()
    history = History()
    if spec.resume and checkpoints.exists():
        state = checkpoints.load()
        check_fits(state, plan.objects.model, spec.run_id, spec.derived)
        spec = spec.for_rest(state)
        if rows is None:  # otherwise ranks check, once they know the rows
            check_order(state, order_of(spec, spec.train.rows, spec.train.layout), spec.run_id)
        history = History(state["history"])
    if len(history) >= spec.epochs:
        _log.warning(
            "run_id=%r has its %d epochs: its model is returned, nothing is trained", spec.run_id, len(history)
        )
    else:
        try:
            packed = pack(plan.objects, "the parameters")

            def run(spec: TrainSpec) -> Any:
                job = renamed(train, plan.name, **_facts(plan, facts or {})), (spec, packed, framework)
                if rows is None:
                    return plan.backend.run(*job)
                assert isinstance(plan.backend, SparkBackend)
                return plan.backend.run(*job, data=rows)

            with _validating(plan, spec, packed, framework, history):
                values = _through_losses(run, spec, checkpoints)
        except RankFailedError as error:
            if isinstance(error.__cause__, DataError | EstimatorError | StoreError):
                raise type(error.__cause__)(str(error.__cause__)) from error
            raise
        except ElasticError as error:
            error.args = (f"{error}\n{_kept(spec)}", *error.args[1:])
            raise
        except ExecutorLostError as error:
            if spec.returns_state:
                raise
            raise ExecutorLostError(f"{error} {_kept(spec)}") from error
        assert values[0] is not None
        history, returned = values[0]
        if returned is not None:
            return returned, history
        state = checkpoints.trained(spec.restore_best_weights)
        checkpoints.check_owner()  # the state is this fit's
        return state, history
    return checkpoints.trained(spec.restore_best_weights), history


def _validating(
    plan: FitPlan, spec: TrainSpec, packed: PackedModule, framework: Any, history: History
) -> AbstractContextManager[None]:
    """Return a context in which separate runs validate the training's checkpoints, if that is requested."""
    if not spec.validation_in_background:
        return nullcontext()
    backend: Any = plan.backend  # the plan has checked that it can

    def run(results: Results, tracker: Tracker) -> tuple[ValidationRequest, dict[str, float]] | None:
        fn = renamed(validate, f"{plan.name} (validation)")
        values = backend.run_in_background(
            fn, (spec, packed, framework, results), spec.validation_in_background, tracker
        )
        result: tuple[ValidationRequest, dict[str, float]] | None = values[0]
        return result

    return BackgroundValidator(ValidationFolder(spec.store, spec.run_id, spec.fit_id), run, history, backend.inheriting)


_FACTS = "epochs batch_size val_batch_size validation shuffle random_seed backward_passes_per_step scale_lr precision"


def _facts(plan: FitPlan, more: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Return the parameters of a fit, and ``more``, as facts for a tracker."""
    known = {name: plan.settings.get(name) for name in _FACTS.split()} | dict(more)
    plain = {name: value if isinstance(value, int | float) else str(value) for name, value in known.items()}
    return {f"fit.{name}": value for name, value in plain.items() if known[name] is not None}


def _through_losses(run: Callable[[TrainSpec], Any], spec: TrainSpec, checkpoints: Checkpoints) -> Any:
    """Return the ranks' results. If all ranks of an elastic fit are lost at once, new ones resume from its checkpoint.

    This repeats only while each attempt has a newer checkpoint, because the cause of the loss may recur.
    """
    version = checkpoints.version()
    while True:
        try:
            return run(spec)
        except StateLostError as error:
            former, version = version, checkpoints.version()
            if version in (None, former):
                raise
            _log.warning("%s. The fit continues from its last checkpoint", str(error).splitlines()[0])
            spec = replace(spec, resume=True)


def _kept(spec: TrainSpec) -> str:
    return f"The last checkpoint, if there was one, is kept: fit again with run_id={spec.run_id!r} to resume from it."
