"""Which genres is a film of, by its title alone? A small transformer and 46,000 titles.

`TextClassifier` gets titles as they are and, of each, a 0 or 1 for each of seven genres. It trains a tokenizer on the
titles, and on two ranks a transformer that begins with random weights. Beside it, on the same rows: Spark ML's
HashingTF, IDF, and a LogisticRegression for each genre. Both have a threshold for each genre that is best on titles
which neither was trained on, and are compared on others.

    python examples/titles_genres.py            some minutes
    python examples/titles_genres.py --help     the knobs
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from local_spark import local_session
from pyspark.ml import Pipeline
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.feature import IDF, HashingTF, RegexTokenizer
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - every Spark program calls it F
from titles_embeddings import GENRES, load_titles
from transformers import ModernBertConfig

from spark_hvd.estimators import TextClassifier

WIDTH, TOKENS, TERMS = 64, 3000, 1 << 14


def classifier(num_proc: int, epochs: int) -> TextClassifier:
    """The estimator: a transformer of one layer, and how it is trained."""
    config = ModernBertConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        classifier_pooling="mean",
        embedding_dropout=0.4,
        mlp_dropout=0.2,
        attention_dropout=0.1,
        classifier_dropout=0.3,
    )
    return TextClassifier(
        model=config,
        text_col="title",
        label_col="genres",
        num_proc=num_proc,
        vocab_size=TOKENS,
        max_length=32,
        epochs=epochs,
        batch_size=64,
        learning_rate=2e-3,
        weight_decay=0.1,
        validation="validation",
        restore_best_weights=True,
        random_seed=0,
    )


def by_words(seen: DataFrame, titles: DataFrame) -> DataFrame:
    """`titles` with `words`, the baseline's probabilities of the genres."""
    columns = [F.col("genres")[number].cast("double").alias(name) for number, name in enumerate(GENRES)]
    stages = [
        RegexTokenizer(inputCol="title", outputCol="terms", pattern=r"\W+"),
        HashingTF(inputCol="terms", outputCol="counts", numFeatures=TERMS),
        IDF(inputCol="counts", outputCol="features"),
    ]
    prepared = Pipeline(stages=stages).fit(seen)
    train = prepared.transform(seen).select("features", *columns).cache()
    found = prepared.transform(titles)
    for name in GENRES:
        one = LogisticRegression(
            labelCol=name, regParam=0.01, standardization=False, maxIter=30,
            probabilityCol=f"p_{name}", rawPredictionCol="", predictionCol="",
        )  # fmt: skip
        found = one.fit(train).transform(found)
    return found.withColumn("words", F.array([vector_to_array(f"p_{name}")[1] for name in GENRES]))


def micro_f1(genres: np.ndarray, predicted: np.ndarray) -> float:
    """Of all pairs of a title and a genre together."""
    return float(2 * (genres & predicted).sum() / max(1, genres.sum() + predicted.sum()))


def best_thresholds(genres: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """For each genre the threshold of its probability with the best micro-F1, found in turns."""
    thresholds = np.full(len(GENRES), 0.3)
    for number in [*range(len(GENRES))] * 3:
        scores = {}
        for threshold in np.arange(0.05, 0.9, 0.025):
            thresholds[number] = threshold
            scores[threshold] = micro_f1(genres, probabilities >= thresholds)
        thresholds[number] = max(scores, key=lambda threshold: scores[threshold])
    return thresholds


def compared(probabilities: DataFrame, column: str) -> tuple[float, float]:
    """Micro-F1 on held-out titles: with a threshold of 0.5, and with the thresholds that are best for validation."""
    rows = probabilities.select("held_out", "genres", column).toPandas()
    genres, found = np.stack(rows["genres"]).astype(bool), np.stack(rows[column])
    test = rows["held_out"].to_numpy()
    thresholds = best_thresholds(genres[~test], found[~test])
    return micro_f1(genres[test], found[test] >= 0.5), micro_f1(genres[test], found[test] >= thresholds)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the titles (default: 3)")
    parser.add_argument("--rows", type=int, help="use a random sample of this many titles (default: all)")
    return parser.parse_args()


def main() -> None:
    """Train, and compare on titles that neither model has seen."""
    arguments = parse_arguments()
    began = time.monotonic()
    print("Starting Spark ...", flush=True)
    spark = local_session("genres", slots=arguments.num_proc)
    titles = load_titles(spark, arguments.rows)
    mark = (F.pmod(F.xxhash64("title", F.lit(1)), F.lit(10)) == 0) & ~F.col("held_out")
    titles = titles.withColumn("validation", mark).cache()
    seen, unseen = titles.where("not held_out"), titles.where("held_out or validation")
    print(f"{seen.count():,} titles to learn from, {titles.where('held_out').count():,} to be compared on.")

    model = classifier(arguments.num_proc, arguments.epochs).fit(seen)
    network = model.transform(unseen).withColumn("network", vector_to_array("probability"))
    trained = time.monotonic()
    words = by_words(seen.where("not validation"), unseen)
    most_frequent = titles.where("not held_out").select(F.array(*[F.avg(F.col("genres")[at]) for at in range(7)]))
    shares = most_frequent.first()[0]
    frequent = unseen.withColumn("frequent", F.array(*map(F.lit, shares)))

    print("\nmicro-F1 over all genres of held-out titles, with thresholds ...  of 0.5   best for validation")
    for name, frame, column in (
        ("how frequent genres are", frequent, "frequent"),
        ("words (Spark ML: HashingTF, IDF, LogisticRegression)", words, "words"),
        (f"transformer of {arguments.num_proc} ranks (spark_hvd)", network, "network"),
    ):
        half, best = compared(frame, column)
        print(f"{name:<66}{half:>6.3f}{best:>12.3f}")
    print("\nSome of them:")
    for row in model.setThreshold(0.35).transform(unseen.where("held_out")).limit(6).collect():
        guess, truth = (", ".join(np.array(GENRES)[np.array(each) > 0]) for each in (row.prediction, row.genres))
        print(f"    {row.title[:40]:<42}{guess or '-':<24} (is {truth})")
    spark.stop()
    print(
        f"\nTotal time: {time.monotonic() - began:.0f} s, of which {trained - began:.0f} s until the model was trained"
    )


if __name__ == "__main__":
    main()
