"""What all estimators share: from a DataFrame and parameters to a trained Spark ML model.

A fit has four stages, each called once: the plan, the trial of one batch, the data, and the training on ranks.
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
from pyspark.ml import Estimator, Model

from spark_hvd.data.parquet import dataset_of
from spark_hvd.data.readers.dataset import Column
from spark_hvd.data.readers.measure import Uses
from spark_hvd.data.readers.reader import Batch
from spark_hvd.data.readers.values import may_have_nulls
from spark_hvd.estimators.data.columns import check_columns, columns_of, expression_of, session_of, widened
from spark_hvd.estimators.data.materialize import materialize
from spark_hvd.estimators.data.reuse import in_use
from spark_hvd.estimators.fit.backend import SparkBackend, tracker_of
from spark_hvd.estimators.fit.logged import log_checkpoints
from spark_hvd.estimators.fit.plan import FitPlan, Settings, check_together, label_of, make_plan, store_missing
from spark_hvd.estimators.fit.ranks import only_fit_of, train_on_ranks
from spark_hvd.estimators.fit.rows import passes_rows_directly, rows_for_ranks
from spark_hvd.estimators.fit.trial import (
    ROWS,
    batch_norm_layers,
    batch_of_rows,
    dtypes_asked,
    first_batch,
    losses_known,
    spec_for,
)
from spark_hvd.estimators.params.persistence import SavedParams
from spark_hvd.estimators.params.tables import MODEL_SETTINGS
from spark_hvd.estimators.training.head import head_of, heads_of
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.rows import reader_spec
from spark_hvd.estimators.training.spec import TrainSpec
from spark_hvd.estimators.training.train import Framework
from spark_hvd.estimators.transform.meta import ModelMeta
from spark_hvd.runner.config import IMPORTS
from spark_hvd.runner.spark import private as spark_private
from spark_hvd.runner.spark.names import job_group, job_named
from spark_hvd.runner.spark.session import tells_case_apart
from spark_hvd.store import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

M = TypeVar("M", bound=Model)


class SparkEstimator(SavedParams, Estimator[M]):
    """Base of the estimators. A subclass defines its table of parameters, its framework, and its model class.

    A saved estimator contains a pickle of model, loss and optimizer: only load what you trust. Its backend and its
    tracker are not saved.
    """

    _not_saved = ("backend", "tracker")
    shown_as = ""
    """Name in messages and displays, if another estimator uses this one to fit."""
    _required: ClassVar[Mapping[str, str]] = {
        "model": "the model to train",
        "feature_cols": "the columns that the model takes",
        "label_cols": "the columns with which outputs are compared",
    }

    @property
    def transform(self) -> NoReturn:
        """Refuse: only the trained model has it."""
        raise AttributeError(
            f"{type(self).__name__}.transform: an estimator is not trained. Use the model that its fit returns: "
            "estimator.fit(df).transform(df)"
        )

    def fit_on_parquet(
        self, train_path: str | None = None, val_path: str | None = None, params: Mapping[Any, Any] | None = None
    ) -> M:
        """Train on existing Parquet: a file or a directory of files, possibly written by Petastorm.

        Args:
            train_path: Path of the training data; by default the store's ``train_path``.
            val_path: Path of the validation data; by default the store's ``val_path``. Without either, nothing is
                validated.
            params: Parameters for this fit only, as in ``fit``.

        Returns:
            The trained model.

        Raises:
            ValueError, TypeError: A parameter is wrong.
            DataError: The data do not exist, or do not match the parameters.
            ModelError: The model does not work on the data.
            RunError: Ranks failed.
        """
        if params:
            return self.copy(dict(params)).fit_on_parquet(train_path, val_path)
        plan = self._plan()
        settings, store = plan.settings, plan.store
        if plan.spec.keeps_epochs:
            raise ValueError(
                "MlflowTracker(checkpoints=True) with fit_on_parquet: the signature of models comes from rows of a "
                "DataFrame. Call fit(spark.read.parquet(...)), or omit checkpoints"
            )
        prepared = (settings["store"] or store).prepared
        train_path, val_path = train_path or prepared[0], val_path or prepared[1]
        if settings["validation"] is not None and val_path is None:
            raise ValueError(
                f"validation={settings['validation']!r}: fit_on_parquet takes validation data from val_path; "
                "omit validation"
            )
        _check_validated(settings, val_path)
        if train_path is None:
            raise ValueError("train_path is missing: pass it, or use Store.create(..., train_path=...)")
        # A store reads only within its own file system; the data may lie elsewhere.
        data = Store.create(train_path, storage_options=store.storage_options)
        edited = {field[0] for field in settings["transformation_edit_fields"] or ()}
        wanted = None if settings["transformation_fn"] else [name for name in plan.spec.columns if name not in edited]
        # No file tells what transformation_fn and decoders return for columns.
        uses = Uses(settings["sample_weight_col"], tuple(settings["label_cols"])) if wanted else None
        train_data = dataset_of(data, train_path, wanted, uses)
        val_data = dataset_of(data, val_path, wanted, uses) if val_path else None
        train_data = replace(train_data, columns=widened(train_data.columns, dtypes_asked(settings)))
        if val_data is not None:
            val_data = replace(val_data, columns=widened(val_data.columns, dtypes_asked(settings)))
        batch = first_batch(plan, train_data, data, settings["reader"])
        drafted = replace(plan, spec=replace(plan.spec, train=train_data, validation=val_data))
        spec = self._tried(drafted, batch, train_data.columns)
        return self._trained(plan, spec, plan.backend.num_processes())

    def _fit(self, dataset: DataFrame) -> M:
        with job_group(session_to_fit(dataset), self.uid):
            return self._fit_on(dataset)

    def _fit_on(self, dataset: DataFrame) -> M:
        check_alone(self.value_of("run_id"))
        plan = self._plan()
        _check_validated(plan.settings, plan.settings["validation"])
        columns = _checked_columns(plan, dataset)
        backend = plan.backend
        with backend.torch_loading() if isinstance(backend, SparkBackend) else nullcontext():
            return self._fit_planned(dataset, plan, columns)

    def _fit_planned(self, dataset: DataFrame, plan: FitPlan, columns: tuple[Column, ...]) -> M:
        with importing("torch._dynamo"):  # the trial's optimizer imports it, which takes as long as torch itself
            rows = _some_rows(dataset, columns, plan.name)
        spec = self._tried(plan, batch_of_rows(plan, rows, columns), columns)
        num_proc = plan.backend.num_processes()
        validation, seed = plan.settings["validation"] or None, plan.settings["random_seed"] or 0
        if passes_rows_directly(plan):
            rows = rows_for_ranks(dataset, columns, validation, seed)
            spec = replace(spec, train=rows.train, validation=rows.validation)
            return self._trained(plan, spec, num_proc, rows.data, dataset)
        if plan.spec.returns_state:
            raise ValueError(store_missing("this reader reads files"))
        train_data, val_data = materialize(
            dataset,
            columns,
            plan.store,
            num_proc=num_proc,
            validation=validation,
            seed=seed,
            partitions_per_process=plan.settings["partitions_per_process"],
            uses=replace(
                spec.uses, nullable=may_have_nulls(reader_spec(spec, plan.objects, dataset=spec.train), columns)
            ),
            who=plan.name,
        )
        with in_use(plan.store, train_data):
            return self._trained(plan, replace(spec, train=train_data, validation=val_data), num_proc, None, dataset)

    def _plan(self) -> FitPlan:
        name = self.shown_as or type(self).__name__
        settings = {row.name: self.value_of(row.name) for row in self._table}
        check_together(name, settings, self._required)
        self._check(settings)
        derived = self._derived(settings)
        env = {IMPORTS: ",".join(self._imports(settings)), **derived.pop("env", {})}
        return make_plan(name, {**settings, **derived, "env": env}, label_of(self.uid, settings))

    def _tried(self, plan: FitPlan, batch: Batch, columns: tuple[Column, ...]) -> TrainSpec:
        spec = spec_for(plan, batch, columns, self._takes_other_columns)
        with batch_norm_layers(plan.objects.model) as layers:
            spec = self._try(plan, spec, batch)
        return replace(spec, needs_two_rows=layers[0] if layers else None)

    def _trained(
        self,
        plan: FitPlan,
        spec: TrainSpec,
        num_proc: int,
        data: Mapping[str, Any] | None = None,
        dataset: DataFrame | None = None,
    ) -> M:
        # Only for a tracker, which a backend may have: for it, an optimizer is created for a copy of the model.
        is_tracked = plan.settings["tracker"] is not None or plan.settings["backend"] is not None
        facts = self._optimizer_facts(plan) if is_tracked else {}
        with only_fit_of(plan.store, spec.run_id):
            state, history = train_on_ranks(plan, spec, num_proc, self._framework, data, facts)
        if spec.keeps_epochs and dataset is not None:
            tracker = tracker_of(plan.backend)
            log_checkpoints(tracker, spec, dataset, history, lambda kept: self._model(plan, spec, kept, history))
        return self._model(plan, spec, state, history)

    # -- what a subclass adds

    _framework: ClassVar[Framework]
    _takes_other_columns: ClassVar[bool] = False
    """Whether transformation_fn may remove features and labels, so that the model gets the rest."""

    def _try(self, plan: FitPlan, spec: TrainSpec, batch: Batch) -> TrainSpec:
        """Train and predict one batch, on copies of the model; raise a ModelError if that fails.

        Returns:
            The specification, with the facts learned.
        """
        raise NotImplementedError

    def _check(self, settings: Settings) -> None:
        """Raise a ValueError for parameters that contradict each other."""

    def _derived(self, settings: Settings) -> dict[str, Any]:
        """Return fields of TrainSpec and Objects that follow from parameters with other names."""
        return {}

    def _imports(self, settings: Settings) -> list[str]:
        """Return the modules to import early in each rank, which take a third of a second, and compute nothing."""
        return ["spark_hvd.estimators.training.train", "spark_hvd.estimators.training.packing"]

    def _optimizer_facts(self, plan: FitPlan) -> dict[str, Any]:
        """Return facts about the optimizer for a tracker, under the names of MLflow's own logging."""
        return {}

    def _untrained(self, plan: FitPlan, spec: TrainSpec) -> M:
        """Return the model that the fit would return, with its initial weights."""
        return self._model(plan, spec, {"model": plan.objects.model.state_dict()}, History())

    def _model(self, plan: FitPlan, spec: TrainSpec, state: Mapping[str, Any], history: History) -> M:
        raise NotImplementedError


def check_alone(run_id: str | None) -> None:
    """Raise a ValueError if this fit has a ``run_id`` and is one of several."""
    if run_id is not None and spark_private.is_one_of_several_fits():
        raise ValueError(
            f"run_id={run_id!r} in one of several fits, such as those of CrossValidator, OneVsRest, or a list of maps: "
            "fits of one run resume each other, and all would return one model. Omit run_id, or fit each by itself"
        )


def session_to_fit(dataset: DataFrame) -> SparkSession:
    """Return the session of a DataFrame that ``fit`` got.

    Raises:
        TypeError: It is not a DataFrame of Spark, or is a streaming one.
        ClusterError: Its session has been stopped.
    """
    session = session_of(dataset, "fit")
    if dataset.isStreaming:
        raise TypeError(
            "fit got a streaming DataFrame, which has no end: use spark.read, or call fit in the "
            "function of writeStream.foreachBatch"
        )
    return session


def model_fields(
    plan: FitPlan, spec: TrainSpec, model: torch.nn.Module, state: Mapping[str, Any], history: History
) -> dict[str, Any]:
    """Return the keywords that every estimator passes to its model; ``state`` is the checkpoint's."""
    labels, losses = tuple(label.column for label in spec.labels), losses_known(plan.objects)
    epoch, heads = len(state.get("history", ())), heads_of(losses, len(labels))
    return {
        "model": model.eval(),
        "metadata": ModelMeta(spec.inputs, labels, head_of(losses), heads=heads, epoch=epoch),
        "history": history,
        "run_id": spec.run_id,
        "feature_columns": plan.settings["feature_cols"],
        "label_columns": plan.settings["label_cols"],
        **{name: plan.settings[name] for name in MODEL_SETTINGS},
    }


def _check_validated(settings: Settings, validation: Any) -> None:
    if (runs := settings.get("validation_in_background")) and not validation:
        raise ValueError(f"validation_in_background={runs} without rows to validate on: pass validation=, or omit it")


def _checked_columns(plan: FitPlan, df: DataFrame) -> tuple[Column, ...]:
    settings, exact = plan.settings, tells_case_apart(df.sparkSession)
    for parameter in ("feature_cols", "label_cols"):
        check_columns(df.schema, settings[parameter], parameter, exact=exact)
    if settings["sample_weight_col"]:
        check_columns(df.schema, [settings["sample_weight_col"]], "sample_weight_col", exact=exact)
    columns = columns_of(
        df.schema,
        plan.spec.columns,
        decoders=set(settings["decoders"]),
        collated=bool(settings.get("collate") or settings["transformation_fn"]),
        text=settings.get("text", ()),
        compress_sparse=settings["compress_sparse_cols"],
    )
    return widened(columns, dtypes_asked(settings))


def _some_rows(df: DataFrame, columns: tuple[Column, ...], who: str) -> pa.Table:
    import pyarrow as pa

    few = df.select([expression_of(column) for column in columns]).limit(ROWS)
    with job_named(few, f"spark_hvd: {who} looks at {ROWS} rows"):
        if hasattr(few, "toArrow"):  # Spark 4
            return few.toArrow()
        return pa.Table.from_pandas(few.toPandas(), preserve_index=False)


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Import a module in a thread, and wait for it at the end; meanwhile this thread must not import torch modules.

    If it cannot be imported, whoever uses it reports that.
    """

    def load() -> None:
        collects = gc.isenabled()
        gc.disable()  # imported objects stay, and searching them again and again takes a quarter of the time
        try:
            with suppress(Exception):
                importlib.import_module(name)
        finally:
            if collects:
                gc.enable()

    thread = threading.Thread(target=load, name="spark_hvd-import", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
