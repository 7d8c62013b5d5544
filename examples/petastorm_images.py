"""Handwritten digits as a Petastorm data set of PNG images, written by Spark and trained on by two ranks.

python examples/petastorm_images.py          writes the images to a temporary folder, trains, tests
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from local_spark import local_session
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from spark_hvd.estimators import Store, TorchEstimator
from spark_hvd.estimators.petastorm_bridge import bridged, install

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def digit_schema() -> Any:
    """What a row holds: an image, stored as PNG, and the digit it shows."""
    from petastorm.codecs import CompressedImageCodec, ScalarCodec
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql.types import IntegerType

    return Unischema(
        "Digits",
        [
            UnischemaField("image", np.uint8, (8, 8), CompressedImageCodec("png"), False),
            UnischemaField("digit", np.int32, (), ScalarCodec(IntegerType()), False),
        ],
    )


def write_images(spark: SparkSession, url: str, images: np.ndarray, digits: Sequence[int]) -> None:
    """Write images and digits as a Petastorm data set, encoded by Spark's tasks."""
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import dict_to_spark_row

    schema = digit_schema()

    def encode(row: tuple[np.ndarray, int]) -> Any:
        image, digit = row
        return dict_to_spark_row(schema, {"image": image, "digit": digit})

    with materialize_dataset(spark, url, schema, row_group_size_mb=1):
        rows = spark.sparkContext.parallelize(list(zip(images, digits, strict=True)), 8)
        # `bridged` sees to it that Spark's workers can import Petastorm before they unpickle the schema
        spark.createDataFrame(rows.map(bridged(encode)), schema.as_spark_schema()).write.parquet(url)


class DigitNet(nn.Module):
    """A CNN for 8 x 8 images of 17 greys, in 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of shape (rows, 10) for images of shape (rows, 1, 8, 8) with numbers from 0 to 16."""
        scores: torch.Tensor = self.layers(images.float() / 16)
        return scores


def main() -> None:
    """Write 80 % of the digits, train on them, test on the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the images (default: 8)")
    arguments = parser.parse_args()

    install()  # before Petastorm is imported
    data = load_digits()
    train_images, test_images, train_digits, test_digits = train_test_split(
        data.images.astype(np.uint8), data.target, test_size=0.2, stratify=data.target, random_state=0
    )
    spark = local_session("petastorm", slots=arguments.num_proc)
    with tempfile.TemporaryDirectory() as folder:
        write_images(spark, f"file://{folder}/digits", train_images, train_digits.tolist())
        model = DigitNet()
        estimator = TorchEstimator(
            num_proc=arguments.num_proc,
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            loss=nn.CrossEntropyLoss(),
            feature_cols=["image"],
            label_cols=["digit"],
            input_shapes=[[-1, 1, 8, 8]],
            batch_size=32,
            epochs=arguments.epochs,
            store=Store.create(f"{folder}/store"),
            random_seed=1,
        )
        trained = estimator.fit_on_parquet(train_path=f"{folder}/digits").getModel().eval()
    spark.stop()

    with torch.no_grad():
        right = trained(torch.from_numpy(test_images)[:, None]).argmax(1).numpy() == test_digits
    print(f"{right.sum()} of {len(right)} test digits right: accuracy {right.mean():.3f}")


if __name__ == "__main__":
    main()
