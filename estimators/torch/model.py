"""``TorchModel``: a trained torch model as a Spark ML model, whose transform sends Arrow batches through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml import Model

from spark_hvd.data.readers.dataset import listed
from spark_hvd.estimators.data.columns import check_columns, expression_of, session_of
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.params import checks
from spark_hvd.estimators.params.params import rows
from spark_hvd.estimators.params.persistence import SavedParams
from spark_hvd.estimators.params.tables import MODEL_SETTINGS, SHARED
from spark_hvd.estimators.training.head import Head, head_of, heads_of
from spark_hvd.estimators.training.history import History, as_history
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.training.packing import PackedModule, pack, unpack
from spark_hvd.estimators.transform.feeds import TensorFeed
from spark_hvd.estimators.transform.frame import appended, check_new
from spark_hvd.estimators.transform.meta import ModelMeta, inputs_as_trained, inputs_of, probed_shapes
from spark_hvd.estimators.transform.models import PickledFunction, sent
from spark_hvd.estimators.transform.outputs import Output, Shape, head_outputs, label_output, to_arrow
from spark_hvd.estimators.transform.predict import Prediction, run
from spark_hvd.runner.spark.session import choose_python, is_connect, tells_case_apart
from spark_hvd.world.words import count

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_OTHER_NAMES = "output_cols, prediction_col, probability_col and raw_prediction_col ('' leaves one out)"

TABLE = (
    *rows(
        "Model",
        ("model", None, checks.instance("a torch.nn.Module", "parameters", "eval", "state_dict"), "The trained model."),
        ("history", None, as_history, "The values that fit recorded for each epoch."),
        ("run_id", None, checks.text, "The run that trained it."),
        ("optimizer", None, checks.anything, "The optimizer after training."),
        ("loss", None, checks.functions, "The loss of each output, which determines its meaning (classes, a value)."),
        ("loss_constructors", None, checks.functions, "Functions that make the losses, in place of `loss`."),
        ("metadata", None, checks.instance("a ModelMeta", "to_json"), "Facts about inputs and outputs, from fit."),
    ),
    *rows(
        "Inputs",
        ("feature_columns", None, checks.names, "One for each input of the model, in its order."),
        ("input_dtypes", None, checks.dtypes, "Dtype of each input; float32 by default."),
        ("batch_size", 1024, checks.whole(1), "Rows that go through the model at once."),
        (
            "use_gpu",
            True,
            checks.flag,
            "Use the GPU that Spark assigned to the task, or any other; otherwise the CPU.",
        ),
    ),
    *rows("Outputs", ("label_columns", None, checks.names, "One for each output of the model, in its order.")),
    *(row for row in SHARED if row.name in MODEL_SETTINGS and row.name not in ("input_dtypes", "use_gpu")),
)


@dataclass(frozen=True)
class PredictionPlan:
    """A planned prediction for the rows of a DataFrame."""

    model: torch.nn.Module
    packed: PackedModule
    specs: tuple[TensorSpec, ...]
    decoders: Mapping[str, Callable[[bytes], Any]]
    plan: tuple[Output, ...]
    outputs: int
    head: Head


class TorchModel(SavedParams, Model):
    """A trained torch model in Spark ML, made by an estimator, or by you from any ``torch.nn.Module``.

        model = TorchModel(model=net, feature_columns=["features"], label_columns=["label"], loss=nn.MSELoss())
        model.transform(df)

    transform keeps the columns of the DataFrame and appends:

    - for each output, ``<label>__output`` in the type of the label: integers are rounded, booleans follow from a
      threshold, vectors and arrays keep their type. Several numbers for a scalar label become a vector. If the label's
      type is unknown (the DataFrame does not have it either), the result is double or vector.
    - for a single output, the columns that Spark's evaluators expect: ``rawPrediction``, ``probability`` and
      ``prediction`` with a classification loss, ``prediction`` with a regression loss.

    Only the feature columns are sent to Python, where each worker process loads the model once. It computes with
    ``spark.task.cpus`` threads (1 by default), so that simultaneous tasks do not share cores.

    A saved model contains a pickle of the model's code: only load models that you trust.
    """

    __module__ = "spark_hvd.estimators"

    _table: ClassVar = TABLE
    _from_json: ClassVar = {"metadata": ModelMeta.from_json}

    def plot_loss(self, metric: str | Sequence[str] = "loss") -> Figure:
        """Draw a loss or metric over the epochs as a matplotlib figure, training and validation together.

        Args:
            metric: A key of the history, or several, which are drawn side by side.

        Raises:
            ValueError: The key does not exist, or no estimator has trained the model.
            ImportError: matplotlib is not installed.
        """
        history = self.value_of("history")
        if not history:
            raise ValueError("the model has no history: only models that an estimator trained have one")
        return History(history).plot((metric,) if isinstance(metric, str) else metric)

    def history_plot(self, keys: Sequence[str] = ("loss",)) -> Figure:
        """Deprecated: the former name of :meth:`plot_loss`."""
        return self.plot_loss(keys)

    def setLabelColoumns(self, value: Sequence[str]) -> TorchModel:  # noqa: N802
        """Set ``label_columns``; Horovod's spelling."""
        return self.setParams(label_columns=value)

    def try_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Predict some rows in this process, as ``transform`` would on executors. Estimators do this before training.

        Args:
            inputs: One tensor (rows, ...) for each of ``feature_columns``.

        Raises:
            ModelError: The model does not run in evaluation mode, cannot be pickled, or has outputs that do not match
                the columns.
        """
        try:
            model = unpack(pack(self.value_of("model"))).eval()
            outputs = run(model, list(inputs), self.value_of("label_columns") or ())
            plan = self._plan(self._label_types(), [tuple(output.shape[1:]) for output in outputs])
            to_arrow(outputs, plan, self._head())
        except Exception as error:
            rows = count(len(inputs[0]), "row")
            raise ModelError(
                f"transform would fail, tried on a batch of {rows} of these data: {type(error).__name__}: {error}"
            ) from error

    def log_to_mlflow(
        self, df: DataFrame, name: str = "model", *, registered_model_name: str | None = None, **options: Any
    ) -> Any:
        """Log the model to MLflow as a pyfunc with a signature, which can be used without spark_hvd and Spark.

        It is logged into the active run, or a new one, on the current tracking server. The pyfunc takes a pandas
        DataFrame with the feature columns, with vectors and arrays as lists, and returns the columns that ``transform``
        appends. The numbers are those of ``transform``, to the bit if the same rows come in one batch and on the same
        kind of processor. The metrics of the epoch of its weights are linked to it (with ``restore_best_weights``, the
        best epoch).

        To load it, you need torch, numpy, pandas and cloudpickle in the driver's versions, and the packages with the
        classes of your network and decoders; ``code_paths=`` includes them. Loading it runs the code in a pickle.

        Args:
            df: Rows as for ``transform``; the first five determine the signature.
            name: Name of the model in the run.
            registered_model_name: Register it under this name, as a new version.
            options: Other options of ``mlflow.pyfunc.log_model``: ``pip_requirements``, ``code_paths``, ``metadata``.

        Returns:
            The ``ModelInfo`` of MLflow; ``mlflow.pyfunc.load_model(info.model_uri)`` loads it.

        Raises:
            ImportError: MLflow is not installed.
            ValueError: There are no rows.
            DataError, ModelError: As ``transform``; or the model cannot be pickled.
        """
        from spark_hvd.estimators.torch.mlflow import log_model

        planned = self._planned(df, "log_to_mlflow")
        return log_model(planned, self.value_of("batch_size"), df, name, registered_model_name, options, self._row())

    def _row(self) -> Mapping[str, float] | None:
        """Return the row of the history of the epoch with these weights."""
        history, meta = self.value_of("history") or (), self.value_of("metadata")
        return history[meta.epoch - 1] if meta is not None and 0 < meta.epoch <= len(history) else None

    def _transform(self, dataset: DataFrame) -> DataFrame:
        session = session_of(dataset, "transform")
        planned = self._planned(dataset, "transform")
        check_new(dataset, [output.name for output in planned.plan], "transform", _OTHER_NAMES)
        choose_python(session)
        job = Prediction(
            model=sent(planned.packed, session, is_connect(session)),
            feed=TensorFeed(
                planned.specs,
                {name: PickledFunction(f"the decoder of {name!r}", each) for name, each in planned.decoders.items()},
            ),
            plan=planned.plan,
            outputs=planned.outputs,
            head=planned.head,
            batch_size=self.value_of("batch_size"),
            use_gpu=self.value_of("use_gpu"),
        )
        return appended(dataset, job, [expression_of(spec.column) for spec in planned.specs])

    def _planned(self, dataset: DataFrame, what: str) -> PredictionPlan:
        """Plan the prediction: the model's inputs from these rows, and its outputs; ``what`` names the caller."""
        session_of(dataset, what)
        model, names = self.value_of("model"), self.value_of("feature_columns")
        for name, value in (("model", model), ("feature_columns", names)):
            if value is None:
                raise ValueError(f"{what} needs {name}: pass it to the constructor, or set it")
        check_columns(dataset.schema, names, "feature_columns", exact=tells_case_apart(dataset.sparkSession))
        decoders, meta = self.value_of("decoders") or {}, self.value_of("metadata")
        shapes, dtypes = self.value_of("input_shapes"), self.value_of("input_dtypes")
        if meta is not None:
            specs = inputs_as_trained(dataset.schema, names, decoders, meta.inputs, shapes, dtypes)
        else:
            specs = inputs_of(dataset.schema, names, decoders, shapes, dtypes, self._takes_text())
        packed = pack(model)
        known = meta.shapes if meta is not None and meta.shapes else None
        labels = self.value_of("label_columns") or ()
        found = known or probed_shapes(dataset, packed, specs, decoders, labels) or self._assumed_shapes()
        plan = self._plan(self._label_types(dataset.schema), found)
        used = {name: decoder for name, decoder in decoders.items() if name in names}
        return PredictionPlan(model, packed, specs, used, plan, len(found), self._head())

    def _takes_text(self) -> bool:
        """Return whether the model accepts columns of text unchanged."""
        return False

    def _head(self) -> Head:
        meta: ModelMeta | None = self.value_of("metadata")
        return meta.head if meta is not None else head_of(self.value_of("loss") or [])

    def _heads(self, outputs: int) -> tuple[Head, ...]:
        meta: ModelMeta | None = self.value_of("metadata")
        if meta is None:
            return heads_of(self.value_of("loss") or [], outputs)
        return meta.heads if len(meta.heads) == outputs else (meta.head,) * outputs

    def _outputs(self) -> int:
        """Return the number of outputs to name."""
        named = self.value_of("output_cols") or self.value_of("label_columns")
        if not named:
            raise ValueError("transform needs label_columns (or output_cols): one for each output of the model")
        return len(named)

    def _assumed_shapes(self) -> tuple[Shape, ...]:
        """Return the outputs' shapes to assume if there is no row to show them; they only determine types."""
        return ((2,) if self._head().kind == "multiclass" else (),) * self._outputs()

    def _plan(self, types: Sequence[str], shapes: Sequence[Shape]) -> tuple[Output, ...]:
        """Return the columns to append for labels of these Spark types and outputs of these shapes.

        Raises:
            ModelError: There are not as many outputs as labels.
        """
        labels = self.value_of("label_columns") or []
        names = self.value_of("output_cols") or [f"{label}__output" for label in labels]
        if self._outputs() != len(shapes):
            raise ModelError(f"the model returns {len(shapes)} outputs, expected one for each of {listed(names)}")
        if labels and len(names) != len(labels):
            raise ValueError(f"output_cols={names!r}: expected {len(labels)}, one for each of {listed(labels)}")
        heads = self._heads(len(names))
        plan = [label_output(name, i, types[i], shapes[i], heads[i]) for i, name in enumerate(names)]
        if len(shapes) == 1:
            columns = (self.value_of(f"{name}_col") for name in ("raw_prediction", "probability", "prediction"))
            plan += head_outputs(self._head(), shapes[0], *columns)
        return tuple(plan)

    def _label_types(self, schema: StructType | None = None) -> list[str]:
        """Return the Spark types of the labels, from training or a DataFrame; "" if neither has them."""
        labels, meta = self.value_of("label_columns") or [""] * self._outputs(), self.value_of("metadata")
        if meta is not None and len(meta.labels) == len(labels):
            return [label.spark_type for label in meta.labels]
        types = {field.name: field.dataType.simpleString() for field in schema.fields} if schema else {}
        return [types.get(label, "") for label in labels]
