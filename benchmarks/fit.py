"""TorchEstimator.fit of 200,000 rows x 20 columns, MLP 20-64-64-1, batch 256, 2 epochs, 2 ranks on local[2].

    python -m benchmarks.fit --runs 5

KerasEstimator on torch fits the same. Each fit is of Parquet that was not fitted before, or again of the same, on a
session that has trained before: by handing the rows to the ranks, or through a store. The phases are measured where
they happen. Horovod cannot run beside today's pyarrow: its figure, 16.6 s, was measured on the same kind of machine
with pyspark 3.5 and pyarrow 10.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.common import session

MINUTES = 2.5
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["KERAS_BACKEND"] = "torch"

HOROVOD = 16.6


def data(spark: Any, folder: str, rows: int, seed: int) -> Any:
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions as F  # noqa: N812

    numbers = [F.randn(seed * 100 + i).cast("float") for i in range(20)]
    df = spark.range(0, rows, 1, 8).select(F.array(*numbers).alias("x"))
    label = (F.col("x")[0] + F.col("x")[1] * F.col("x")[2]).cast("float").alias("y")
    df.select(array_to_vector(F.col("x")).alias("features"), label).write.parquet(f"{folder}/{seed}")
    return spark.read.parquet(f"{folder}/{seed}")


def timed(phases: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            phases[name] += time.perf_counter() - began

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000)
    arguments = parser.parse_args()
    import torch
    from torch import nn

    from spark_hvd.estimators import KerasEstimator, SparkBackend, TorchEstimator
    from spark_hvd.estimators.data.materialize import materialize
    from spark_hvd.estimators.fit import estimator as module

    spark = session()
    phases: dict[str, float] = defaultdict(float)
    vars(module)["materialize"] = timed(phases, "prepare", materialize)
    SparkBackend.run = timed(phases, "train", SparkBackend.run)  # type: ignore[method-assign]

    def of_torch(settings: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        return TorchEstimator(
            model=net, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3), loss=nn.MSELoss(), **settings
        )

    def of_keras(settings: dict[str, Any]) -> Any:
        import keras
        from keras import layers

        net = keras.Sequential([keras.Input((20,)), *(layers.Dense(64, "relu") for _ in range(2)), layers.Dense(1)])
        return KerasEstimator(model=net, optimizer=keras.optimizers.Adam(1e-3), loss="mse", **settings)

    def fit(df: Any, store: str | None = None, make: Callable[[dict[str, Any]], Any] = of_torch) -> dict[str, float]:
        phases.clear()
        estimator = make({
            "feature_cols": ["features"], "label_cols": ["y"], "batch_size": 256, "epochs": 2, "num_proc": 2,
            "store": store, "verbose": 0,
        })  # fmt: skip
        began = time.perf_counter()
        model = estimator.fit(df)
        total = time.perf_counter() - began
        epochs = sum(row["seconds"] for row in model.value_of("history"))
        rest = total - sum(phases.values())
        return {"total": total, **phases, "of that the two epochs": epochs, "the rest": rest}

    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="fit-") as folder:
        store = f"{folder}/store"
        results["first of a session"].append(fit(data(spark, folder, arguments.rows, 1)))
        for number in range(arguments.runs):
            df = data(spark, folder, arguments.rows, number + 2)
            results["new data"].append(fit(df))
            results["the same, KerasEstimator on torch"].append(fit(df, make=of_keras))
            results["new data, through a store"].append(fit(df, store))
            results["the same data again, found in the store"].append(fit(df, store))
    keys = ["total", "prepare", "train", "of that the two epochs", "the rest"]
    print(f"| fit of {arguments.rows:,} rows | {' | '.join(f'{key} s' for key in keys)} | Horovod / ours |")
    print("|---|" + "---|" * (len(keys) + 1))
    for name, found in results.items():
        medians = {key: statistics.median(result.get(key, 0.0) for result in found) for key in keys}
        print(
            f"| {name} | "
            + " | ".join(f"{medians[key]:.2f}" for key in keys)
            + f" | {HOROVOD / medians['total']:.1f} |"
        )
    spark.stop()


if __name__ == "__main__":
    main()
