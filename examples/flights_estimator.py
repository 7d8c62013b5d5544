"""Late flights again, as a Spark ML Pipeline: StringIndexer, VectorAssembler, TorchEstimator, an evaluator.

The same question and the same held-out days as in flights.py. For comparison, Spark's own logistic regression and
gradient-boosted trees learn from the same rows, and with --keras the same network in Keras.

    python examples/flights_estimator.py            the real thing, two or three minutes
    python examples/flights_estimator.py --help     the knobs
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from flights import CATEGORIES, NUMBERS, build_features, load_tables
from local_spark import local_session
from pyspark.ml import Pipeline
from pyspark.ml.classification import GBTClassifier, LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import Imputer, OneHotEncoder, StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import functions as F  # noqa: N812 - every Spark program calls it F
from torch import nn

from spark_hvd.estimators import EarlyStopping, KerasEstimator, TorchEstimator

CODES = [f"{name}_code" for name in CATEGORIES]
FILLED = [f"{name}_filled" for name in NUMBERS]


class Lateness(nn.Module):
    """An embedding for each category, then a small network over them and the numbers; gives the logit of `late`."""

    def __init__(self, sizes: list[int], numbers: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size + 1, min(16, size)) for size in sizes)
        width = sum(embedding.embedding_dim for embedding in self.embeddings) + numbers
        self.layers = nn.Sequential(
            nn.Linear(width, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch, 1), of codes (batch, len(CATEGORIES)) int64 and numbers (batch, len(NUMBERS))."""
        embedded = [embed(codes[:, i]) for i, embed in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, numbers], dim=1))


def lateness_in_keras(sizes: list[int], numbers: int) -> Any:
    """The same network as a functional model; gives the probability of `late`."""
    os.environ.setdefault("KERAS_BACKEND", "torch")  # before it is imported
    import keras
    from keras import layers

    codes, rest = keras.Input((len(sizes),), dtype="int64"), keras.Input((numbers,))
    embedded = [layers.Embedding(size + 1, min(16, size))(codes[:, i]) for i, size in enumerate(sizes)]
    hidden = layers.Dropout(0.3)(layers.Dense(128, "relu")(layers.Concatenate()([*embedded, rest])))
    return keras.Model([codes, rest], layers.Dense(1, "sigmoid")(layers.Dense(64, "relu")(hidden)))


def codes_and_numbers() -> list[Any]:
    """Stages that append the columns `codes` and `numbers`; the first one knows the categories."""
    return [
        StringIndexer(inputCols=CATEGORIES, outputCols=CODES, handleInvalid="keep"),
        Imputer(inputCols=NUMBERS, outputCols=FILLED),
        VectorAssembler(inputCols=FILLED, outputCol="raw_numbers"),
        StandardScaler(inputCol="raw_numbers", outputCol="numbers", withMean=True),
        VectorAssembler(inputCols=CODES, outputCol="codes"),
    ]


def keras_estimator(sizes: list[int], arguments: argparse.Namespace) -> KerasEstimator:
    """An estimator of that, trained as the other one is."""
    model = lateness_in_keras(sizes, len(NUMBERS))
    import keras

    return KerasEstimator(
        model=model,
        optimizer=keras.optimizers.AdamW(1e-3, weight_decay=1e-2),
        loss="binary_crossentropy",
        feature_cols=["codes", "numbers"],
        label_cols=["label"],
        validation=0.1,
        batch_size=512,
        epochs=arguments.epochs,
        num_proc=arguments.num_proc,
        callbacks=[keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)],
        random_seed=0,
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training days (default: 8)")
    parser.add_argument("--rows", type=int, help="use a random sample of this many flights (default: all)")
    parser.add_argument("--trees", type=int, default=20, help="gradient-boosted trees (default: 20)")
    parser.add_argument("--validate-beside", action="store_true", help="validate on free slots while ranks go on")
    parser.add_argument("--keras", action="store_true", help="the same network in Keras, too (needs spark_hvd[keras])")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the loss curve (default: out)")
    return parser.parse_args()


def main() -> None:
    """Features, a pipeline with a network at its end, and what it is worth."""
    arguments = parse_arguments()
    print("Starting Spark ...", flush=True)
    spark = local_session("flights-estimator", slots=arguments.num_proc + arguments.validate_beside)
    flights = build_features(*load_tables(spark, arguments.rows)).cache()

    prepare = Pipeline(
        stages=[
            *codes_and_numbers(),
            OneHotEncoder(inputCols=CODES, outputCols=[f"{name}_hot" for name in CATEGORIES]),
            VectorAssembler(inputCols=[f"{name}_hot" for name in CATEGORIES] + ["numbers"], outputCol="hot"),
            VectorAssembler(inputCols=["codes", "numbers"], outputCol="trees"),
        ]
    ).fit(flights.where(~F.col("held_out")))
    rows = prepare.transform(flights).select("label", "held_out", "codes", "numbers", "hot", "trees").cache()
    train, test = rows.where(~F.col("held_out")), rows.where("held_out")
    print(f"{train.count():,} flights to learn from, {test.count():,} on held-out days.")

    torch.manual_seed(0)
    sizes = [len(labels) for labels in prepare.stages[0].labelsArray]
    network = TorchEstimator(
        model=Lateness(sizes, len(NUMBERS)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-2),
        loss=nn.BCEWithLogitsLoss(),
        feature_cols=["codes", "numbers"],
        input_dtypes=["int64", "float32"],
        label_cols=["label"],
        validation=0.1,
        validation_in_background=arguments.validate_beside,
        batch_size=512,
        epochs=arguments.epochs,
        num_proc=arguments.num_proc,
        callbacks=[EarlyStopping(patience=2)],
        restore_best_weights=True,
        random_seed=0,
    )
    contenders = {
        "logistic regression (Spark ML)": LogisticRegression(featuresCol="hot", maxIter=50),
        f"{arguments.trees} gradient-boosted trees (Spark ML)": GBTClassifier(
            featuresCol="trees", maxIter=arguments.trees, maxBins=128, seed=0
        ),
        f"network on {arguments.num_proc} ranks (spark_hvd)": network,
    }
    if arguments.keras:
        name = f"Keras network on {arguments.num_proc} ranks (spark_hvd)"
        contenders = {name: keras_estimator(sizes, arguments), **contenders}  # the last one's history is shown
    judge = BinaryClassificationEvaluator(labelCol="label", metricName="areaUnderROC")
    results = {}
    for name, contender in contenders.items():
        print(f"Fitting: {name} ...", flush=True)
        began = time.monotonic()
        model = contender.fit(train)
        results[name] = judge.evaluate(model.transform(test)), time.monotonic() - began

    print(f"\n{'':<40}{'AUC':>6}{'seconds':>10}")
    for name, (auc, seconds) in results.items():
        print(f"{name:<40}{auc:>6.3f}{seconds:>10.0f}")
    history = model.getHistory()
    print(f"\n{history.to_pandas()[['loss', 'val_loss', 'rows_per_second']].round(4)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    history.plot().savefig(arguments.out / "flights_estimator_loss.png", dpi=120)
    print(f"\nLoss curve: {arguments.out / 'flights_estimator_loss.png'}")
    spark.stop()


if __name__ == "__main__":
    main()
