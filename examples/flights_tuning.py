"""Late flights, tuned: twenty trials of an Optuna study after the default, several fits at once, the poor ones pruned.

The same question and the same held-out days as in flights_estimator.py. Trials are compared by the loss on a tenth of
the training days' flights; the held-out days are asked once, at the end, for the default and for the best.

    python examples/flights_tuning.py               on 20,000 flights, a few minutes
    python examples/flights_tuning.py --help        the knobs
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import optuna
import torch
from flights import NUMBERS, build_features, load_tables
from flights_estimator import codes_and_numbers
from local_spark import local_session
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.sql import functions as F  # noqa: N812 - every Spark program calls it F
from torch import nn

from spark_hvd import tuning
from spark_hvd.estimators import TorchEstimator

DEFAULT = {"lr": 1e-3, "weight_decay": 1e-2, "width": 128, "dropout": 0.3, "embedding": 16, "batch_size": 512}


class Lateness(nn.Module):
    """An embedding for each category, then two layers of a width over them and the numbers; gives a logit."""

    def __init__(self, sizes: list[int], numbers: int, *, width: int, dropout: float, embedding: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size + 1, min(embedding, size)) for size in sizes)
        inputs = sum(each.embedding_dim for each in self.embeddings) + numbers
        self.layers = nn.Sequential(
            *(nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, 1)),
        )

    def forward(self, codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, 1), of codes (batch, categories) int64 and numbers (batch, numbers) float32."""
        embedded = [embed(codes[:, i]) for i, embed in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, numbers], dim=1))


def estimator(sizes: list[int], chosen: dict[str, Any], arguments: argparse.Namespace, **more: Any) -> TorchEstimator:
    """The network with these hyperparameters; the same ones start with the same weights."""
    torch.manual_seed(0)
    shape = {name: chosen[name] for name in ("width", "dropout", "embedding")}
    rates = {name: chosen[name] for name in ("lr", "weight_decay")}
    return TorchEstimator(
        model=Lateness(sizes, len(NUMBERS), **shape),
        optimizer=lambda params: torch.optim.AdamW(params, **rates),
        loss=nn.BCEWithLogitsLoss(),
        feature_cols=["codes", "numbers"],
        input_dtypes=["int64", "float32"],
        label_cols=["label"],
        validation=0.1,
        batch_size=chosen["batch_size"],
        epochs=arguments.epochs,
        num_proc=arguments.num_proc,
        restore_best_weights=True,
        random_seed=0,
        verbose=0,
        **more,
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20, help="fits to try (default: 20)")
    parser.add_argument("--parallel", type=int, default=2, help="of them at once (default: 2)")
    parser.add_argument("--num-proc", type=int, default=1, help="ranks of each (default: 1)")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training days (default: 6)")
    parser.add_argument("--rows", type=int, default=20_000, help="a random sample of the flights (default: 20000)")
    return parser.parse_args()


def main() -> None:
    """Features, the default, a study, and what the best of it is worth."""
    arguments = parse_arguments()
    print("Starting Spark ...", flush=True)
    spark = local_session("flights-tuning", slots=arguments.parallel * arguments.num_proc)
    flights = build_features(*load_tables(spark, arguments.rows)).cache()
    prepare = Pipeline(stages=codes_and_numbers()).fit(flights.where(~F.col("held_out")))
    rows = prepare.transform(flights).select("label", "held_out", "codes", "numbers").cache()
    train, test = rows.where(~F.col("held_out")), rows.where("held_out")
    print(f"{train.count():,} flights to learn from, {test.count():,} on held-out days.", flush=True)
    sizes = [len(labels) for labels in prepare.stages[0].labelsArray]

    def objective(trial: optuna.Trial) -> float:
        chosen = {
            "lr": trial.suggest_float("lr", 1e-4, 3e-2, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 1e-4, 1e-1, log=True),
            "width": trial.suggest_categorical("width", [32, 64, 128, 256]),
            "dropout": trial.suggest_float("dropout", 0.0, 0.6),
            "embedding": trial.suggest_categorical("embedding", [4, 8, 16]),
            "batch_size": trial.suggest_categorical("batch_size", [128, 256, 512]),
        }
        tracker = tuning.TrialTracker(trial, "val_loss")
        model = estimator(sizes, chosen, arguments, tracker=tracker).fit(train)
        return min(row["val_loss"] for row in model.getHistory())

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True),  # trials that run count as poor meanwhile
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1),
    )
    began = time.monotonic()
    tuning.optimize(study, objective, arguments.trials, parallel=arguments.parallel, spark=spark)
    states = [trial.state.name for trial in study.trials]
    print(
        f"{len(states)} trials in {time.monotonic() - began:.0f} s: {states.count('COMPLETE')} complete, "
        f"{states.count('PRUNED')} pruned, {states.count('FAIL')} failed."
    )
    shown = {name: f"{value:.2g}" if isinstance(value, float) else value for name, value in study.best_params.items()}
    print(f"The best: {', '.join(f'{name} {value}' for name, value in shown.items())}", flush=True)

    judge = BinaryClassificationEvaluator(labelCol="label", metricName="areaUnderROC")
    print(f"\n{'':<24}{'val_loss':>10}{'AUC':>8}")
    for name, chosen in {"the default": DEFAULT, "the best trial": study.best_params}.items():
        model = estimator(sizes, chosen, arguments).fit(train)
        loss = min(row["val_loss"] for row in model.getHistory())
        print(f"{name:<24}{loss:>10.4f}{judge.evaluate(model.transform(test)):>8.3f}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
