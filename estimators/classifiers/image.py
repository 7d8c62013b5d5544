"""``ImageClassifier`` trains any torch module that takes images to classify a column of images."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pyspark.sql import types as T  # noqa: N812 - the usual name

from spark_hvd.data.images import ImageDecoder
from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.classifiers.decoding import CountSkipped, DecodedImages, ImageCollate, NanForSkipped
from spark_hvd.estimators.classifiers.estimator import NeuralClassifier, Prepared
from spark_hvd.estimators.classifiers.labels import Labels
from spark_hvd.estimators.classifiers.model import NeuralClassificationModel
from spark_hvd.estimators.classifiers.tables import estimator_table, model_table
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.params import checks as c
from spark_hvd.estimators.params.params import rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_IMAGE_FIELDS = {"height", "width", "nChannels", "data"}
"""Fields of Spark's image type."""


def _decoder(name: str, value: Any) -> ImageDecoder:
    if isinstance(value, bool) or not isinstance(value, int | ImageDecoder):
        raise TypeError(f"{name}={value!r}: expected a spark_hvd.data.ImageDecoder, or the height and width in pixels")
    return value if isinstance(value, ImageDecoder) else ImageDecoder(value)


_DECODER = (
    "decoder",
    224,
    _decoder,
    "A `spark_hvd.data.ImageDecoder`, or the height and width in pixels, with ImageNet's normalisation.",
)


class ImageClassificationModel(NeuralClassificationModel):
    """A trained classifier of images: ``transform`` appends the class and the probabilities of all classes.

    If the decoder skips images that cannot be decoded, their prediction is null. ``getModel()`` returns the trained
    module.

    A saved model contains a pickle of the model's code: only load models that you trust.
    """

    __module__ = "spark_hvd.estimators"

    _table: ClassVar = model_table(
        *rows(
            "Model",
            ("model", None, c.instance("a torch.nn.Module", "parameters", "eval", "state_dict"), "The trained model."),
            ("image_col", None, c.text, "Column of images."),
            _DECODER,
        )
    )
    _column: ClassVar = "image_col"

    def _inputs(self, settings: Mapping[str, Any]) -> DecodedImages:
        return DecodedImages(settings["decoder"])

    def _wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        return NanForSkipped(model)


class ImageClassifier(NeuralClassifier[ImageClassificationModel]):
    """Trains a module to classify images, on several ranks.

        model = ImageClassifier(model=net, image_col="content", label_col="kind", num_proc=8).fit(df)
        model.transform(df).select("kind", "prediction", "probability")

    Ranks get encoded images (PNG, JPEG or another common format) from a binary column, or a column of Spark's image
    type. Threads of the rank decode them. ``model`` takes float32 tensors (rows, channels, height, width) and returns
    scores (rows, classes) before softmax. Only parameters with ``requires_grad`` are trained. Labels are text, numbers
    or booleans, or arrays with 0 or 1 for each class if an image may have several classes (multi-label).

    An image that cannot be decoded ends the fit with a DataError. ``decoder=ImageDecoder(224, undecodable="skip")``
    leaves such images out, and the history counts them as "undecodable".

    Raises:
        TypeError, ValueError: A parameter is unknown or its value is not allowed.
    """

    __module__ = "spark_hvd.estimators"

    _table: ClassVar = estimator_table(
        *rows(
            "Model and columns",
            ("model", None, c.instance("a torch.nn.Module", "forward", "parameters"), "Takes images, returns scores."),
            ("image_col", None, c.text, "Column of images: binary, or of Spark's image type."),
            ("label_col", None, c.text, "Column of classes: text, numbers, booleans, or arrays of 0 and 1."),
            _DECODER,
            (
                "augment",
                None,
                c.function,
                "Random changes of training images, such as `spark_hvd.data.ImageAugmentation()`: a function of a "
                "tensor (rows, channels, height, width) and a torch.Generator.",
            ),
        )
    )
    _column: ClassVar = "image_col"
    _model_class: ClassVar = ImageClassificationModel

    def _check(self, dataset: DataFrame, settings: Mapping[str, Any]) -> None:
        name = settings["image_col"]
        kind = dataset.schema[name].dataType
        is_image = isinstance(kind, T.StructType) and set(kind.names) >= _IMAGE_FIELDS
        if not isinstance(kind, T.BinaryType) and not is_image:
            raise DataError(
                f"image_col={name!r} is of type {kind.simpleString()}: expected binary, such as 'content' of "
                "spark.read.format('binaryFile'), or 'image' of spark.read.format('image')"
            )
        if is_image and settings["store"] is not None:
            raise ValueError(
                f"image_col={name!r} is of Spark's image type, which cannot be written to a store: omit store, or "
                "pass a binary column, such as 'content' of spark.read.format('binaryFile')"
            )

    def _prepared(self, dataset: DataFrame, settings: Mapping[str, Any], labels: Labels) -> Prepared:
        decoder = settings["decoder"]
        _check_scores(settings["model"], decoder, labels)
        return Prepared(
            settings["model"], DecodedImages(decoder), learning_rate=1e-3, fields={"decoder": copy.copy(decoder)}
        )

    def _collate(self, settings: Mapping[str, Any], prepared: Prepared, labels: Labels) -> ImageCollate:
        assert isinstance(prepared.inputs, DecodedImages)
        column, seed = settings["image_col"], settings["random_seed"] or 0
        return ImageCollate(column, prepared.inputs, labels, augment=settings["augment"], seed=seed)

    def _trained(
        self, dataset: DataFrame, settings: Mapping[str, Any], labels: Labels, prepared: Prepared
    ) -> ImageClassificationModel:
        decoder = settings["decoder"]
        if decoder.undecodable == "skip":
            settings = {**settings, "callbacks": [CountSkipped(decoder), *settings["callbacks"]]}
        return super()._trained(dataset, settings, labels, prepared)


def _check_scores(model: torch.nn.Module, decoder: ImageDecoder, labels: Labels) -> None:
    """Refuse a model with another number of classes. A model for 1,000 classes would learn ten without any error."""
    shape = 2, decoder.channels, *decoder.size
    training = model.training
    try:
        with torch.no_grad():
            param = next(model.parameters(), torch.empty(0, device="cpu"))
            scores = model.eval()(torch.zeros(shape, device=param.device))
    except Exception as error:
        raise ModelError(
            f"the model failed on images {list(shape)}, as the decoder makes them: {type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(training)
    if not isinstance(scores, torch.Tensor) or tuple(scores.shape) != (2, labels.size):
        has = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise ModelError(
            f"the model returns {has} for 2 images, but column {labels.column!r} has {labels.size} classes: expected "
            f"scores [2, {labels.size}]. Replace its last layer by one such as torch.nn.Linear(..., {labels.size})"
        )
