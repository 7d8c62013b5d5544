"""``horovod.spark.lightning``: methods that subclasses of Horovod's estimator and model override, on top of ours."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.data.columns import check_columns, session_of
from spark_hvd.estimators.fit.estimator import model_fields
from spark_hvd.estimators.fit.plan import FitPlan, Settings
from spark_hvd.estimators.lightning.estimator import LightningEstimator, LightningModel, try_lightning
from spark_hvd.estimators.params.params import TableParams
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.packing import pack
from spark_hvd.estimators.training.spec import TrainSpec
from spark_hvd.estimators.transform.declared import declared_outputs
from spark_hvd.estimators.transform.feeds import CollatedFeed
from spark_hvd.estimators.transform.frame import appended, check_new
from spark_hvd.estimators.transform.models import PickledFunction, sent
from spark_hvd.estimators.transform.predict import Prediction
from spark_hvd.runner.spark.private import set_defaults, unowned_param
from spark_hvd.runner.spark.series import quoted
from spark_hvd.runner.spark.session import choose_python, is_connect, tells_case_apart

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from typing_extensions import Self

Row = Mapping[str, Any]


class _OwnParams(TableParams):
    """Accepts Params that a subclass declares itself by name too, as loading does; their values are not checked."""

    def setParams(self, **values: Any) -> Self:  # noqa: N802 - Spark's name
        known = {row.name for row in self._table}
        own = {name: value for name, value in values.items() if name not in known and self.hasParam(name)}
        self._set(**own)
        return super().setParams(**{name: value for name, value in values.items() if name not in own})


class HorovodModel(_OwnParams, LightningModel):
    """Horovod's TorchModel: a LightningModel whose subclasses may define how the model processes a row.

    A subclass may define ``get_prediction_fn()``, which returns a function of the model and a row, a mapping of the
    feature columns' names to values. The function returns a tensor, or one for each output; they become the vectors
    ``outputCols``.
    """

    outputCols = unowned_param("outputCols", "Names of the columns that transform appends.")  # noqa: N815
    _metadata = unowned_param("_metadata", "Facts about inputs and outputs, recorded by fit.")

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        set_defaults(self, {"outputCols": None, "_metadata": None})

    def setOutputCols(self, value: Sequence[str]) -> HorovodModel:  # noqa: N802
        """Set the names of the columns that transform appends."""
        return self._set(outputCols=list(value))

    def getOutputCols(self) -> list[str]:  # noqa: N802
        """Return the names of the columns that transform appends."""
        labels = self.value_of("label_columns") or ()
        return list(self.getOrDefault("outputCols") or [f"{label}__output" for label in labels])

    def _transform(self, dataset: DataFrame) -> DataFrame:
        asked: Callable[[], Any] | None = getattr(self, "get_prediction_fn", None)
        if asked is None:
            return super()._transform(dataset)
        session = session_of(dataset, "transform")
        names, outputs = self.value_of("feature_columns"), self.getOutputCols()
        check_columns(dataset.schema, names, "feature_columns", exact=tells_case_apart(session))
        check_new(dataset, outputs, "transform", "setOutputCols")
        choose_python(session)
        packed = pack(_RowByRow(self.value_of("model"), asked()))
        job = Prediction(
            model=sent(packed, session, is_connect(session)),
            feed=CollatedFeed(tuple(names), PickledFunction("rows", _RowMappings(names)), (), None),
            plan=declared_outputs(dict.fromkeys(outputs, "vector")),
            outputs=None,
            head=Head("other"),
            batch_size=self.value_of("batch_size"),
            use_gpu=False,  # the function makes tensors on the CPU
        )
        return appended(dataset, job, [dataset[quoted(name)] for name in names])


class HorovodEstimator(_OwnParams, LightningEstimator):
    """Horovod's TorchEstimator for Lightning: ``transformation_fn`` takes a row, and subclasses choose the model.

    ``get_model_class()`` returns the class of the trained model, ``_get_model_kwargs`` the arguments of its
    constructor.
    """

    _takes_other_columns = True

    def get_model_class(self) -> type[HorovodModel]:
        """Return the class of the model that fit returns."""
        return HorovodModel

    def getLoss(self) -> None:  # noqa: N802
        """Return None: a LightningModule has its own loss."""

    def getLossConstructors(self) -> None:  # noqa: N802
        """Return None: a LightningModule has its own loss."""

    def _get_model_kwargs(self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any) -> dict[str, Any]:
        return {"model": model, "history": history, "run_id": run_id, "_metadata": metadata}

    def _derived(self, settings: Settings) -> dict[str, Any]:
        function = settings["transformation_fn"]
        derived = super()._derived(settings)
        return derived if function is None else {**derived, "transformation_fn": _EachRow(function)}

    def _try(self, plan: FitPlan, spec: TrainSpec, batch: Batch) -> TrainSpec:
        if not hasattr(self.get_model_class(), "get_prediction_fn"):
            return super()._try(plan, spec, batch)
        try_lightning(spec, plan.objects, batch)
        return spec

    def _model(self, plan: FitPlan, spec: TrainSpec, state: Mapping[str, Any], history: History) -> LightningModel:
        trained = super()._model(plan, spec, state, history)
        fields = model_fields(plan, spec, trained.value_of("model"), state, history)
        given = self._get_model_kwargs(fields["model"], history, None, spec.run_id, fields["metadata"])
        model = self.get_model_class()(**given)
        if model.getOrDefault("metadata") is None:
            chosen = {row.name for row in model._table if model.isSet(row.name)}
            model.setParams(**{name: value for name, value in fields.items() if name not in chosen})
        return model


class _EachRow:
    """Applies a function of a row to a DataFrame of rows."""

    def __init__(self, function: Callable[[dict[str, Any]], Row]) -> None:
        self._function = function

    def __call__(self, frame: pd.DataFrame) -> pd.DataFrame:
        try:
            rows = [self._function(dict(zip(frame.columns, row, strict=True))) for row in frame.itertuples(index=False)]
        except AttributeError as error:
            if type(error.obj) is not dict:
                raise
            raise TypeError(
                f"{error}: the transformation_fn of horovod.spark.lightning.TorchEstimator gets a row, a dict of "
                "columns' names to values, and returns one; spark_hvd.estimators.LightningEstimator passes a DataFrame"
            ) from error
        names = rows[0] if rows else ()
        made: pd.DataFrame = pd.DataFrame({name: [_plain(row[name]) for row in rows] for name in names})
        return made


def _plain(value: Any) -> Any:
    value = value.numpy() if isinstance(value, torch.Tensor) else value
    return value.item() if getattr(value, "ndim", None) == 0 else value


class _RowMappings:
    """Turns a list of values for each column into one mapping of names to values for each row."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def __call__(self, *columns: list[Any]) -> tuple[list[Row]]:
        return ([dict(zip(self._names, row, strict=True)) for row in zip(*columns, strict=True)],)


class _RowByRow(torch.nn.Module):
    """A model that is called for one row after another."""

    def __init__(self, model: torch.nn.Module, function: Callable[[Any, Row], Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def __reduce__(self) -> tuple[Any, ...]:
        # Modules of model and function may import horovod, which a worker does not find before this is called there.
        return _row_by_row, ("horovod" in sys.modules,), self.__dict__

    def forward(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        found = [self.function(self.model, row) for row in rows]
        each = [one if isinstance(one, list | tuple) else [one] for one in found]
        return [torch.stack([torch.as_tensor(one).flatten() for one in output]) for output in zip(*each, strict=True)]


def _row_by_row(named: bool) -> _RowByRow:
    if named:
        importlib.import_module("spark_hvd.horovod")
    return _RowByRow.__new__(_RowByRow)
