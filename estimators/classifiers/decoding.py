"""Decodes images for ImageClassifier, in ranks and in Spark's Python workers, and counts those that it skips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

import spark_hvd.torch as hvd
from spark_hvd.data.images import Augment, ImageDecoder
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.classifiers.training import Collate, Inputs
from spark_hvd.estimators.training.callbacks import Callback, TrainState


@dataclass(frozen=True)
class DecodedImages(Inputs):
    """Makes a tensor from encoded images. Skipped images are NaN."""

    decoder: ImageDecoder

    def __call__(self, values: list[Any], training: bool) -> dict[str, torch.Tensor]:
        return {"image": self.decoder(values)}


@dataclass(frozen=True)
class ImageCollate(Collate):
    """Makes a batch for training without the rows whose images are skipped, so a batch may be empty."""

    inputs: DecodedImages
    augment: Augment | None = None
    seed: int = 0

    def __call__(self, rows: pa.RecordBatch, training: bool) -> Batch:
        augment = self.augment if training else None
        images, kept = self.inputs.decoder.rows_of(rows, self.column, augment, self.seed)
        labels = rows.column(self.labels.column)
        return {
            self.column: images,
            self.labels.column: self.labels.tensor(labels if kept.all() else labels.filter(pa.array(kept))),
        }


class CountSkipped(Callback):
    """Records the number of images that an epoch skipped in its row of the history, as "undecodable"."""

    def __init__(self, decoder: ImageDecoder) -> None:
        self._decoder, self._before = decoder, 0

    def on_epoch_begin(self, state: TrainState) -> None:
        self._before = self._decoder.skipped

    def on_epoch_end(self, state: TrainState) -> None:
        here = torch.tensor([self._decoder.skipped - self._before], device="cpu")
        everywhere = int(hvd.allreduce(here, op=hvd.Sum, name="spark_hvd.undecodable"))
        if everywhere:
            state.history[-1]["undecodable"] = everywhere


class NanForSkipped(torch.nn.Module):
    """Wraps a model of images, and returns scores (rows, classes) of NaN for images of NaN."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        skipped = images[:, 0, 0, 0].isnan()
        if not skipped.any():
            scores: torch.Tensor = self.model(images)
            return scores
        scores = self.model(images.nan_to_num())
        return scores.masked_fill(skipped.unsqueeze(1), torch.nan)
