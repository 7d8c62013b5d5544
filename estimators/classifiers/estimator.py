"""``NeuralClassifier``: the base of the classifiers of a raw column, such as text or images.

Its fit prepares a model and its labels, and trains them with a `CollatedEstimator`, whose ranks make the tensors.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from pyspark.ml import Estimator

from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.classifiers.classes import labels_of
from spark_hvd.estimators.classifiers.labels import Labels
from spark_hvd.estimators.classifiers.model import NeuralClassificationModel
from spark_hvd.estimators.classifiers.training import Collate, Inputs, adamw, warmup_and_decay
from spark_hvd.estimators.data.columns import check_columns
from spark_hvd.estimators.fit.estimator import check_alone, session_to_fit
from spark_hvd.estimators.fit.plan import FitPlan, Settings
from spark_hvd.estimators.fit.trial import ROWS
from spark_hvd.estimators.params import checks
from spark_hvd.estimators.params.params import Parameter
from spark_hvd.estimators.params.persistence import SavedParams
from spark_hvd.estimators.params.tables import TORCH
from spark_hvd.estimators.torch.estimator import TorchEstimator
from spark_hvd.estimators.torch.trial import try_batch
from spark_hvd.estimators.training.checkpoint import Checkpoints
from spark_hvd.estimators.training.spec import TrainSpec
from spark_hvd.runner.spark.names import job_group
from spark_hvd.runner.spark.private import rename
from spark_hvd.runner.spark.session import tells_case_apart

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class CollatedEstimator(TorchEstimator):
    """A TorchEstimator for columns of any type: on each rank, ``collate`` makes a batch of tensors from rows.

    The model gets the tensors of a batch in their order, except those with the name of one of ``label_cols``.
    """

    _table: ClassVar = (
        *TORCH,
        Parameter("collate", None, checks.function, "Function from a RecordBatch and `training` to a batch."),
        Parameter("derived", None, checks.anything, "What a resumed fit must have derived from its data, too."),
    )

    def _imports(self, settings: Settings) -> list[str]:
        # The modules with the code of Transformers models take seconds to import.
        code = {type(module).__module__ for module in settings["model"].modules()}
        slow = sorted(name for name in code if name.partition(".")[0] in ("transformers", "peft"))
        return [*super()._imports(settings), *slow]

    def _try(self, plan: FitPlan, spec: TrainSpec, batch: Batch) -> TrainSpec:
        if not len(batch[spec.labels[0].column.name]):
            raise DataError(
                f"none of the first {ROWS} rows can be used for training: all were skipped. Check the column"
            )
        return try_batch(spec, plan.objects, batch)


M = TypeVar("M", bound=NeuralClassificationModel)


@dataclass(frozen=True)
class Prepared:
    """A model to train, and what its training needs.

    Attributes:
        model: Takes the tensors that ``inputs`` makes, in their order, and returns logits (rows, classes).
        inputs: Makes the model's tensors from the values of the column.
        learning_rate: The learning rate if the user sets none.
        fields: Parameters of the trained model, besides those that all classifiers have.
        derived: What was trained or computed from the data, besides the classes, as a checkpoint can hold it.
    """

    model: torch.nn.Module
    inputs: Inputs
    learning_rate: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Any] = field(default_factory=dict)


class NeuralClassifier(SavedParams, Estimator[M]):
    """Base class of the classifiers. A subclass defines a table of parameters, the feature column, and the model.

    A fit first reads all rows once, to find the classes, which may be text, and to check for nulls. Then it tries a
    batch on the driver. Finally it hands the unchanged rows to the ranks, which make tensors from them and train.
    """

    _not_saved: ClassVar = ("backend", "tracker")
    _column: ClassVar[str]
    """Name of the parameter that holds the name of the feature column."""
    _model_class: ClassVar[type[NeuralClassificationModel]]

    def _fit(self, dataset: DataFrame) -> M:
        session = session_to_fit(dataset)
        settings = {row.name: self.value_of(row.name) for row in self._table}
        for name in ("model", self._column, "label_col"):
            if settings[name] is None:
                raise ValueError(f"{name} is missing: {type(self).__name__} needs it")
        check_alone(settings["run_id"])
        column, label = settings[self._column], settings["label_col"]
        exact = tells_case_apart(session)
        check_columns(dataset.schema, [column], self._column, exact=exact)
        check_columns(dataset.schema, [label], "label_col", exact=exact)
        self._check(dataset, settings)
        with job_group(session, self.uid):
            labels = labels_of(dataset, label, column, type(self).__name__)
            seed = settings["random_seed"]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(random.SystemRandom().randrange(2**31) if seed is None else seed)
                prepared = self._prepared(dataset, settings, labels)
            return self._trained(dataset, settings, labels, prepared)

    def _trained(self, dataset: DataFrame, settings: Mapping[str, Any], labels: Labels, prepared: Prepared) -> M:
        shared = {row.name for row in CollatedEstimator._table} & settings.keys() - {"model"}
        inner = CollatedEstimator(
            model=prepared.model,
            feature_cols=[settings[self._column]],
            label_cols=[labels.column],
            collate=self._collate(settings, prepared, labels),
            derived={**({"classes": list(labels.classes)} if labels.classes else {}), **prepared.derived},
            loss=labels.loss,
            metrics=[labels.accuracy],
            optimizer=partial(
                adamw, lr=settings["learning_rate"] or prepared.learning_rate, weight_decay=settings["weight_decay"]
            ),
            lr_scheduler=partial(warmup_and_decay, warmup=settings["warmup"]),
            lr_scheduler_interval="step",
            scale_lr=False,
            **{name: settings[name] for name in shared},
        )
        # Messages and the tracker must name this estimator, not the inner one.
        inner.shown_as = type(self).__name__
        rename(inner, self.uid)
        trained = inner._fit_on(dataset)
        model = self._model_class(
            labels=labels,
            history=trained.value_of("history"),
            run_id=trained.value_of("run_id"),
            model=self._unwrapped(trained.value_of("model")),
            **{self._column: settings[self._column], **prepared.fields},
            **{name: settings[name] for name in ("prediction_col", "probability_col", "threshold", "use_gpu")},
        )
        return model  # type: ignore[return-value] # _model_class is M

    # ---- methods that a subclass overrides --------------------------------------------------------------------------

    def _check(self, dataset: DataFrame, settings: Mapping[str, Any]) -> None:
        """Raise a DataError if a column has the wrong type, a ValueError if parameters contradict each other."""

    def _prepared(self, dataset: DataFrame, settings: Mapping[str, Any], labels: Labels) -> Prepared:
        """Return the model to train; called with torch's seed set."""
        raise NotImplementedError

    def _collate(self, settings: Mapping[str, Any], prepared: Prepared, labels: Labels) -> Collate:
        """Return the function that makes batches from rows."""
        return Collate(settings[self._column], prepared.inputs, labels)

    def _unwrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's model, if :meth:`_prepared` has wrapped it."""
        return model


def derived_before(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what earlier fits of the run have derived from their data, from its checkpoint; None if there is none."""
    if settings["run_id"] is None or settings["store"] is None:
        return None
    checkpoints = Checkpoints(settings["store"], settings["run_id"])
    return checkpoints.load().get("derived", {}) if checkpoints.exists() else None
