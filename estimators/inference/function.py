"""``spark_hvd.predict`` appends the outputs of any model to a DataFrame.

On the driver, `predict` checks its arguments and makes a `Prediction` (estimators/transform), which executors run over
batches of Arrow.
"""

from __future__ import annotations

import inspect
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import ArrayType, BinaryType, StringType

from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.data.columns import check_columns, columns_of, expression_of, session_of
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.keras.module import KerasModule
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.training.packing import pack
from spark_hvd.estimators.transform.declared import declared_outputs
from spark_hvd.estimators.transform.feeds import CollatedFeed, ModelFeed, TensorFeed
from spark_hvd.estimators.transform.frame import appended, check_new
from spark_hvd.estimators.transform.models import ModelSource, PickledFunction, memory_named, sent
from spark_hvd.estimators.transform.predict import Prediction
from spark_hvd.runner.outcome.next_step import MODULE_ON_SPARK
from spark_hvd.runner.outcome.payload import UnpicklableError, explain
from spark_hvd.runner.spark.series import quoted
from spark_hvd.runner.spark.session import choose_python, is_connect, tells_case_apart

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

_MODELS = "a torch.nn.Module, a keras.Model"


def predict(
    df: DataFrame,
    model_or_loader: Any,
    *,
    columns: str | Sequence[str] | Mapping[str, str],
    outputs: str | DataType | Mapping[str, str | DataType],
    collate: Callable[..., Any] | None = None,
    batch_size: int = 256,
    window: int | None = None,
    use_gpu: bool = True,
) -> DataFrame:
    """Append the outputs of a model to a DataFrame: predictions, embeddings, labels.

        spark_hvd.predict(df, net, columns=["features"], outputs={"score": "float"})

        def load():  # on executors
            return Encoder("/models/encoder")

        spark_hvd.predict(
            df, load, columns="title", outputs={"embedding": "array<float>"},
            collate=lambda titles: tokenizer(titles, padding=True, truncation=True, return_tensors="pt"),
        )

    Each Python worker loads the model once, regardless of the number of batches and tasks. Each executor has one file
    with the weights of a torch model. Its workers share the pages, so together they need the memory of one model.

    Args:
        df: The rows. Their columns and order are kept.
        model_or_loader: A ``torch.nn.Module`` (such as a model of Transformers) or a ``keras.Model``, sent to the
            executors; or a function without arguments that is called there and returns one of these or any callable. A
            returned module is loaded once per executor if it can be pickled, and anything else once per worker. Modules
            are put into evaluation mode and onto the device.
        columns: Names of the inputs: one name, several in the order of the model's arguments, or a mapping from the
            names of arguments to columns. Numbers, arrays of numbers and vectors become tensors (rows, ...). Double and
            decimal become float32; ids and other whole numbers above 2**24 that this would change raise an error. Other
            types, and arrays of different lengths, need ``collate``.
        outputs: The type of the new column "prediction", or types by names, as DDL or as Spark's objects: numbers,
            boolean, string, binary, arrays of these, "vector". If the model returns a mapping, these names are taken
            from it; from a tuple or list, outputs are taken in order. An output is a tensor (rows, ...), an array, or a
            list of values.
        collate: Function that makes the model's arguments from a batch, such as a tokenizer with padding or an image
            decoder. It gets a list of values for each column (by name if ``columns`` is a mapping), and returns a tuple
            of arguments, a mapping of them by name, or a single argument. It runs on executors, in a background thread.
        batch_size: Rows of a batch.
        window: With ``collate``, the number of rows among which rows of similar length (of text, bytes or arrays) form
            batches, to save padding; None for the rows that Spark sends at once
            (``spark.sql.execution.arrow.maxRecordsPerBatch``, 10,000).
        use_gpu: Use the GPU that Spark assigned to the task (``spark.task.resource.gpu.amount``), or any available.

    Returns:
        ``df`` with the new columns. Nothing is computed before an action.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
        DataError: A column is missing or cannot become a tensor, or one of ``outputs`` already exists. In an action,
            there are nulls, or arrays of different lengths.
        ModelError: In an action, the model cannot be loaded, fails, returns other outputs, rows or shapes, or does not
            fit into memory.
        UnpicklableError: The model, the loader or ``collate`` cannot be sent to executors.
    """
    session = session_of(df, "predict")
    for name, number in (("batch_size", batch_size), ("window", window)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ValueError(f"{name}={number!r}: expected a whole number from 1")
    if window is not None and collate is None:
        raise ValueError(f"window={window} without collate=: it groups rows for collate. Omit window, or pass collate")
    plan = declared_outputs(outputs)
    names, arguments = _names(columns)
    check_columns(df.schema, names, "columns", exact=tells_case_apart(session))
    check_new(df, [output.name for output in plan], "predict", "outputs={'name': type}")
    feed: ModelFeed
    if collate is None:
        _check_types(df.schema, names)
        specs = tuple(TensorSpec(column) for column in columns_of(df.schema, names))
        feed = TensorFeed(specs, {}, arguments, "predict")
        inputs = [expression_of(spec.column, rounds=False) for spec in specs]
    else:
        _check_pickles("collate", collate)
        feed = CollatedFeed(names, PickledFunction("collate", collate), arguments, window)
        inputs = [_value_of(df.schema, name) for name in names]
    choose_python(session)
    job = Prediction(
        model=_source(model_or_loader, session, is_connect(session)),
        feed=feed,
        plan=plan,
        outputs=None,
        head=Head("other"),
        batch_size=batch_size,
        use_gpu=use_gpu,
    )
    return appended(df, job, inputs)


def _names(columns: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the columns, and those of the model's arguments, which are empty if there are no names."""
    named = isinstance(columns, Mapping)
    names = (columns,) if isinstance(columns, str) else tuple(columns.values() if named else columns)
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"columns={columns!r}: expected names of columns, at least one, or a mapping from arguments to them"
        )
    if not named and len(set(names)) < len(names):
        raise ValueError(f"columns={columns!r}: a name occurs twice. Pass a mapping from arguments to columns")
    if named and len(set(names)) < len(names):
        raise ValueError(f"columns={columns!r}: a column occurs twice. Pass it once, and use it twice in the model")
    return names, tuple(columns) if named else ()


def _check_types(schema: StructType, names: Sequence[str]) -> None:
    for name in names:
        if isinstance(schema[name].dataType, StringType | BinaryType):
            raise DataError(
                f"column {name!r} is of type {schema[name].dataType.simpleString()}, which cannot become a tensor: "
                "pass collate=, a function from a list of values to the model's argument (a tokenizer)"
            )


def _value_of(schema: StructType, name: str) -> SparkColumn:
    """Return a column's values as ``collate`` gets them; a vector becomes a list of numbers."""
    type_ = schema[name].dataType
    if type_.simpleString() == "vector":
        return expression_of(columns_of(schema, [name])[0])
    inner = type_
    while isinstance(inner, ArrayType):
        inner = inner.elementType
    if hasattr(inner, "sqlType"):  # a user-defined type
        raise DataError(
            f"column {name!r} is of type {type_.simpleString()}, which Spark does not send to Python: cast it first"
        )
    return F.col(quoted(name))


def _source(model_or_loader: Any, session: Any, connect: bool) -> ModelSource:
    module = _module(model_or_loader)
    if module is not None:
        return sent(pack(module), session, connect)
    expected = f"expected {_MODELS}, or a function without arguments that returns a callable"
    if not callable(model_or_loader):
        raise TypeError(f"predict got {model_or_loader!r} as its model: {expected}")
    if required := _required_arguments(model_or_loader):
        raise TypeError(
            f"predict got {model_or_loader!r}, which takes {', '.join(required)}, as its model: {expected}. For a "
            "function that is the model itself, pass `lambda: function`"
        )
    _check_pickles("model_or_loader", model_or_loader)
    loader = _ModelLoader(PickledFunction(_name(model_or_loader), model_or_loader))
    return ModelSource(uuid.uuid4().hex, loader=loader)  # a new id each time: the function may load another model


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's required arguments; empty if Python does not know its signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]


def _module(model: Any) -> Any:
    """Return a model of torch or Keras as a ``torch.nn.Module``; None for anything else."""
    keras = sys.modules.get("keras")
    if keras and isinstance(model, keras.Model):  # checked first: on Keras' torch backend it is also a torch.nn.Module
        return KerasModule(model)
    return model if isinstance(model, torch.nn.Module) else None


def _check_pickles(name: str, value: Any) -> None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise UnpicklableError(
            f"cannot pickle {name}: {explain([(name, value)], error)}\nIt is sent to executors. If it cannot be "
            "sent, load it in model_or_loader, a function without arguments"
        ) from error


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


@dataclass(frozen=True)
class _ModelLoader:
    """Calls the user's loader in a Spark worker. If it fails, a ModelError gives the reason."""

    function: PickledFunction

    def __call__(self) -> Any:
        name = self.function.name
        with memory_named(f"what {name} loads"):
            try:
                model = self.function()
            except (MemoryError, torch.OutOfMemoryError, ModelError):
                raise
            except Exception as error:
                raise ModelError(
                    f"{name} failed on {socket.gethostname()}: {type(error).__name__}: {error}\nIt is called on "
                    f"executors: the files and packages that it needs must exist there. {MODULE_ON_SPARK}"
                ) from error
        if not callable(model):
            raise ModelError(f"{name} returned {model!r}: expected {_MODELS}, or a function")
        module = _module(model)
        return model if module is None else module
