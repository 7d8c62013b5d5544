"""ImageClassifier: from images in a DataFrame to predictions; undecodable images; messages about mistakes."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image
from pyspark.sql import functions as F  # noqa: N812
from torch import nn

import spark_hvd
import spark_hvd.torch as hvd
from spark_hvd import DataError
from spark_hvd.data import ImageAugmentation, ImageDecoder
from spark_hvd.estimators import ImageClassificationModel, ImageClassifier, ModelError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

cloudpickle.register_pickle_by_value(sys.modules[__name__])

COLOURS = {"blue": (40, 60, 220), "green": (50, 200, 60), "red": (210, 50, 50)}
SIZE, ROWS = 8, 96


def image_of(colour: str, number: int) -> bytes:
    """A blob of colour with noise; PNG or JPEG, with or without opacity, in turn."""
    noise = np.random.default_rng(number).normal(0, 25, (12, 10, 3))
    image = Image.fromarray((np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8))
    file = io.BytesIO()
    image.convert("RGBA" if number % 3 == 0 else "RGB").save(file, "PNG" if number % 3 < 2 else "JPEG")
    return file.getvalue()


def net(seed: int = 0, classes: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, classes),
    )  # fmt: skip


def classifier(**options: Any) -> ImageClassifier:
    settings: dict[str, Any] = {
        "model": net(), "image_col": "image", "label_col": "colour", "num_proc": 2, "decoder": SIZE, "epochs": 3,
        "batch_size": 8, "learning_rate": 0.05, "random_seed": 1, "verbose": 0, "progress": "off",
    }  # fmt: skip
    return ImageClassifier(**{**settings, **options})


@pytest.fixture(scope="module")
def images(spark: SparkSession) -> DataFrame:
    """Return id, colour, and image, in two partitions."""
    names = list(COLOURS)
    rows = [(each, names[each % 3], bytearray(image_of(names[each % 3], each))) for each in range(ROWS)]
    return spark.createDataFrame(rows, "id int, colour string, image binary").repartition(2, "id").cache()


def broken(images: DataFrame, share: int) -> DataFrame:
    """Truncate every ``share``-th image."""
    lost = F.col("id") % share == 0
    return images.withColumn("image", F.when(lost, F.expr("substring(image, 1, 40)")).otherwise(F.col("image")))


def accuracy(predicted: DataFrame) -> float:
    return predicted.where("prediction = colour").count() / predicted.count()


def test_fit_transform_save_load(images: DataFrame, tmp_path: Path) -> None:
    model: Any = classifier(augment=ImageAugmentation(1), validation=0.2).fit(images)
    assert type(model).__module__ == "spark_hvd.estimators"
    assert model.classes == ["blue", "green", "red"]
    history = model.getHistory()
    assert [row["epoch"] for row in history] == [1, 2, 3]
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= history[-1].keys()
    predicted = model.transform(images).cache()
    assert predicted.columns == [*images.columns, "prediction", "probability"]
    assert accuracy(predicted) > 0.9

    model.write().overwrite().save(str(tmp_path / "model"))
    again = ImageClassificationModel.load(str(tmp_path / "model"))
    rows = [frame.orderBy("id").collect() for frame in (predicted, again.transform(images))]
    assert rows[0] == rows[1]

    # the same by hand: Pillow's pixels, through the trained module
    first = predicted.orderBy("id").first()
    assert first is not None
    pixels = ImageDecoder(SIZE)([bytes(first.image)])
    with torch.inference_mode():
        expected = model.getModel().eval()(pixels).softmax(1)
    np.testing.assert_allclose(first.probability.toArray(), expected[0], rtol=1e-4, atol=1e-5)


def test_undecodable_images_are_skipped_and_counted(images: DataFrame) -> None:
    # So many that some batches of a rank have no row left; then only the others' gradients and statistics count.
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(net())
    some = broken(images, 2).withColumn("held", (F.col("id") >= 84).cast("int"))
    decoder = ImageDecoder(SIZE, undecodable="skip")
    settings: dict[str, Any] = {"batch_size": 1, "validation": "held", "learning_rate": 0.01}
    fitted: Any = classifier(model=model, decoder=decoder, **settings).fit(some)
    lost = [row["undecodable"] for row in fitted.getHistory()]
    assert lost == [ROWS // 2] * 3
    assert all(np.isfinite([row["loss"], row["val_loss"]]).all() for row in fitted.getHistory())
    predicted = fitted.transform(some).cache()
    assert predicted.where("prediction is null").count() == ROWS // 2
    assert predicted.where("prediction is null and id % 2 = 0").count() == ROWS // 2
    assert all(np.isnan(row.probability.toArray()).all() for row in predicted.where("prediction is null").collect())


def test_undecodable_images_stop(images: DataFrame) -> None:
    few = images.withColumn("image", F.when(F.col("id") == 41, F.lit(b"no image")).otherwise(F.col("image")))
    with pytest.raises(DataError, match=r"1 of \d+ images of the batch of column 'image' cannot be decoded"):
        classifier(epochs=1).fit(few)
    with pytest.raises(DataError, match=r"undecodable='skip'"):  # found by the trial on the driver
        classifier(epochs=1).fit(broken(images, 1))
    with pytest.raises(DataError, match=r"none of the first 32 rows"):
        classifier(decoder=ImageDecoder(SIZE, undecodable="skip"), epochs=1).fit(broken(images, 1))


def test_files_and_sparks_image_type(spark: SparkSession, images: DataFrame, tmp_path: Path) -> None:
    for row in images.where("id < 12").collect():
        (tmp_path / f"{row.id}-{row.colour}.png").write_bytes(row.image)
    (tmp_path / "99-red.png").write_bytes(b"no image")
    kind = F.regexp_extract("path", r"(\w+)\.png$", 1)
    files = spark.read.format("binaryFile").load(str(tmp_path)).withColumn("colour", kind)
    pictures = spark.read.format("image").load(str(tmp_path)).withColumn("path", F.col("image.origin"))
    pictures = pictures.withColumn("colour", kind)
    decoder = ImageDecoder(SIZE, undecodable="skip", crop=False)
    of_files: Any = classifier(image_col="content", decoder=decoder, epochs=1, num_proc=1).fit(files)
    of_pictures: Any = classifier(decoder=decoder, epochs=1, num_proc=1).fit(pictures)
    assert of_files.getHistory()[0]["undecodable"] == of_pictures.getHistory()[0]["undecodable"] == 1
    means = spark_hvd.predict(
        pictures, Means(), columns="image", collate=decoder, outputs={"means": "array<float>"}
    ).collect()
    colours = {row.colour for row in means}
    assert colours == set(COLOURS)
    for row in means:
        if "99" in row.path:
            assert np.isnan(row.means).all()
        else:
            assert np.argmax(row.means) == {"red": 0, "green": 1, "blue": 2}[row.colour]
    predicted = of_pictures.transform(pictures)
    assert predicted.where("prediction is null").count() == 1


class Means(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3))


def test_run_decodes_in_ranks(spark: SparkSession, images: DataFrame) -> None:
    def count() -> Any:
        import spark_hvd.torch as hvd

        hvd.init()
        decoder = ImageDecoder(SIZE, undecodable="skip")
        shard = hvd.get_dataset_shard("train")
        columns = ["image", "id"]
        loader = shard.torch_batches(8, columns=columns, collate_fn=decoder.collate("image"))
        batches = list(loader)
        assert all(batch["image"].shape == (len(batch["id"]), 3, SIZE, SIZE) for batch in batches)
        return torch.cat([batch["id"] for batch in batches]).tolist(), decoder.skipped

    results = spark_hvd.run(count, num_proc=2, data={"train": broken(images, 4)}, spark=spark)
    assert sorted(results[0][0] + results[1][0]) == [each for each in range(ROWS) if each % 4]
    assert results[0][1] + results[1][1] == ROWS // 4


def test_mistakes(images: DataFrame) -> None:
    with pytest.raises(DataError, match=r"image_col='colour' is of type string: expected binary"):
        classifier(image_col="colour", label_col="id").fit(images)
    with pytest.raises(ModelError, match=r"returns \[2, 5\] for 2 images, but column 'colour' has 3 classes"):
        classifier(model=net(classes=5)).fit(images)
    with pytest.raises(ModelError, match=r"the model failed on images \[2, 1, 8, 8\]"):
        classifier(decoder=ImageDecoder(SIZE, channels=1)).fit(images)
    with pytest.raises(TypeError, match=r"decoder='png': expected a spark_hvd.data.ImageDecoder, or the height"):
        classifier(decoder="png")
