"""A trained model in MLflow: logged with a signature, and with everything needed to load it without spark_hvd."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from spark_hvd.data.readers.dataset import Column
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.transform import scoring
from spark_hvd.runner.spark.series import quoted
from spark_hvd.runner.watch.mlflow import allowed
from spark_hvd.scratch import Scratch

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

    from spark_hvd.estimators.torch.model import PredictionPlan

_LOADER = "spark_hvd_scoring"
"""Name of the copy of :mod:`spark_hvd.estimators.transform.scoring` in a logged model."""
_NEEDED = ("torch", "numpy", "pandas", "cloudpickle")


def log_model(
    planned: PredictionPlan,
    batch_size: int,
    df: DataFrame,
    name: str,
    registered_model_name: str | None,
    options: Any,
    row: Mapping[str, float] | None,
) -> Any:
    """See :meth:`spark_hvd.estimators.TorchModel.log_to_mlflow`."""
    try:
        import mlflow
        from mlflow.models import infer_signature
    except ImportError as error:
        raise ImportError("log_to_mlflow needs MLflow on the driver: pip install mlflow-skinny") from error
    plan = _plan(planned, batch_size)
    example = df.select(*(_for_pandas(spec.column) for spec in planned.specs)).limit(5).toPandas()
    for column in example:
        if example[column].dtype == object and column not in planned.decoders:  # JSON has no numpy arrays
            example[column] = [value.tolist() if hasattr(value, "tolist") else value for value in example[column]]
    if example.empty:
        raise ValueError("log_to_mlflow got a DataFrame without rows: the signature needs some; pass the rows of fit")
    with Scratch("mlflow") as folder:
        data, code = os.path.join(folder, "data"), os.path.join(folder, f"{_LOADER}.py")
        os.mkdir(data)
        shutil.copyfile(scoring.__file__, code)
        try:
            with open(os.path.join(data, "plan.pkl"), "wb") as file:
                cloudpickle.dump(plan, file)
            torch.save(planned.model, os.path.join(data, "model.pt"), pickle_module=cloudpickle)
        except Exception as error:
            raise ModelError(f"the model cannot be pickled for MLflow: {type(error).__name__}: {error}") from error
        predicted = scoring._load_pyfunc(data).predict(example)
        given = {**options, "code_paths": [code, *options.get("code_paths", ())]}
        if not {"pip_requirements", "conda_env"} & given.keys():
            given["pip_requirements"] = [*pinned(_NEEDED), *given.pop("extra_pip_requirements", ())]
        return with_metrics(
            lambda: mlflow.pyfunc.log_model(
                name=name,
                loader_module=_LOADER,
                data_path=data,
                signature=infer_signature(example, predicted),
                registered_model_name=registered_model_name,
                **given,
            ),
            row,
        )


def pinned(modules: Iterable[str]) -> list[str]:
    """Return requirements for these modules' packages, without local labels such as ``+cpu``, which PyPI lacks."""
    found = []
    for name in modules:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # tensorflow may come from tensorflow-cpu
            name = importlib.metadata.packages_distributions()[name][0]
            version = importlib.metadata.version(name)
        found.append(f"{name}=={version.partition('+')[0]}")
    return found


def with_metrics(log: Callable[[], Any], row: Mapping[str, float] | None) -> Any:
    """Return the ``ModelInfo`` of what ``log`` logs to the active or a new run; link a row of the history to it."""
    import mlflow

    with nullcontext() if mlflow.active_run() else mlflow.start_run():  # metrics need a run
        info = log()
        if row is not None:
            metrics = {allowed(key): value for key, value in row.items() if key != "epoch"}
            mlflow.log_metrics(metrics, step=int(row["epoch"]), model_id=info.model_id)
    return info


def _for_pandas(column: Column) -> SparkColumn:
    """Return the column as users of the model usually have it: unchanged, vectors as lists, decimals as doubles."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    source = F.col(quoted(column.name))
    if column.spark_type == "vector":
        source = vector_to_array(source)
    elif column.spark_type.startswith("decimal"):
        source = source.cast("double")
    return source.alias(column.name)


def _plan(planned: PredictionPlan, batch_size: int) -> Mapping[str, Any]:
    """Return what :class:`spark_hvd.estimators.transform.scoring.ScoredModel` needs, as plain data."""
    return {
        "inputs": [
            {
                "name": spec.column.name,
                "dtype": spec.column.dtype,
                "to": spec.dtype,
                "shape": spec.shape,
                "stacked": spec.stacked,
            }
            for spec in planned.specs
        ],
        "outputs": [
            {name: getattr(each, name) for name in ("name", "index", "role", "element", "depth", "threshold", "digits")}
            for each in planned.plan
        ],
        "kind": planned.head.kind,
        "scores": planned.head.scores,
        "decoders": dict(planned.decoders),
        "batch_size": batch_size,
    }
