"""Handwritten digits with Lightning: a LightningModule trained on a DataFrame, judged by Spark's own evaluator.

python examples/digits_lightning.py
"""

from __future__ import annotations

import argparse
import tempfile

import lightning as L  # noqa: N812 - the usual name
import torch
from local_spark import local_session
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from sklearn.datasets import load_digits
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from spark_hvd.estimators import LightningEstimator, Store


class Digits(L.LightningModule):
    """A CNN for 8 x 8 images in 10 classes."""

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
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits of the classes; what transform calls, with the feature columns."""
        return self.layers(pixels)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """A batch has the feature and label columns, by name."""
        return nn.functional.cross_entropy(self(batch["pixels"]), batch["digit"])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """What is logged is in the history."""
        logits = self(batch["pixels"])
        self.accuracy(logits, batch["digit"])
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch["digit"]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The gradients that it sees are means over all ranks."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    """Train on 80 % of the digits, a tenth of them for validation, and test on the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: 20)")
    arguments = parser.parse_args()

    spark = local_session("digits_lightning", slots=arguments.num_proc)
    data = load_digits()
    rows = [(image.tolist(), int(digit)) for image, digit in zip(data.data / 16, data.target, strict=True)]
    df = spark.createDataFrame(rows, "pixels array<float>, digit int")
    training, test = df.randomSplit([0.8, 0.2], seed=0)

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        estimator = LightningEstimator(
            model=Digits(),
            task="multiclass",
            feature_cols=["pixels"],
            label_cols=["digit"],
            input_shapes=[[-1, 1, 8, 8]],
            store=Store.create(folder),
            num_proc=arguments.num_proc,
            batch_size=32,
            epochs=arguments.epochs,
            validation=0.1,
            monitor="val_accuracy",
            monitor_mode="max",
            restore_best_weights=True,
            random_seed=0,
        )
        model = estimator.fit(training)

    predictions = model.transform(test)
    accuracy = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy").evaluate(predictions)
    print(f"{test.count()} test digits: accuracy {accuracy:.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
