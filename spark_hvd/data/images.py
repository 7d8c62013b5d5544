"""Decode images from bytes to tensors in the process that uses them: in threads, cropped to one size, normalised."""

from __future__ import annotations

import functools
import io
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from spark_hvd.data.columns import Collate, torch_batch
from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.world.words import count

if TYPE_CHECKING:
    from PIL.Image import Image

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of red, green and blue over ImageNet, with which most networks were pretrained."""
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Formats opened by default. Pillow knows others, but decodes them by other programs or by rarely used code."""
_BY_PROGRAMS = {"EPS", "WMF", "BUFR", "GRIB", "HDF5"}
"""Formats that Pillow passes to Ghostscript, to Windows, or to a registered handler."""
MAX_PIXELS = 89_478_485
"""The size above which Pillow warns: 256 MiB at three bytes per pixel."""
_SHOWN = 3
"""Number of undecodable images that an error describes."""

Augment = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
"""Changes float32 images (rows, channels, height, width) at random. The generator makes all draws."""


class ImageDecoder:
    """Decodes images to a tensor: PNG, JPEG or another of ``formats``, or Spark's image type.

    Pass it to ``spark_hvd.predict(collate=)``. For ``torch_batches(collate_fn=)`` see :meth:`collate`.

        decoder = spark_hvd.data.ImageDecoder(224)
        spark_hvd.predict(df, net, columns="content", collate=decoder, outputs={"scores": "array<float>"})

    Several threads decode. Images are rotated by their EXIF orientation, cropped to the proportions of ``size`` around
    their centre, and scaled. A large JPEG is decoded only at the resolution needed.

    Args:
        size: Height and width in pixels; one number for both.
        channels: 3 for RGB, 1 for grey, 4 for RGBA. Other images are converted.
        mean: Subtracted from pixels between 0 and 1: a number, or one for each channel; by default ImageNet's.
        std: Divisor after that: a number, or one for each channel; by default ImageNet's.
        crop: False to stretch images to the size instead of cropping.
        undecodable: "stop" raises a DataError if an image cannot be decoded. "skip" leaves it out of a training batch,
            and makes its prediction from NaN.
        threads: Number of decoding threads; None for torch's number of threads in that process.
        formats: Pillow's names of the formats to open. Formats that this Pillow lacks are left out. Formats that other
            programs decode, above all EPS, are not allowed.
        max_pixels: An image that declares more is undecodable, because a small file can expand to gigabytes.

    Attributes:
        skipped: Number of images that could not be decoded so far, in this process.

    Raises:
        ValueError: An argument is out of its range.
        ImportError: Pillow is not installed here, or where images are decoded.
    """

    __module__ = "spark_hvd.data"

    formats: tuple[str, ...] = FORMATS  # both defaults are for decoders pickled by versions without them
    max_pixels: int = MAX_PIXELS

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        channels: int = 3,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        crop: bool = True,
        undecodable: str = "stop",
        threads: int | None = None,
        formats: Sequence[str] = FORMATS,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        if height < 1 or width < 1:
            raise ValueError(f"size={size!r}: expected pixels from 1, a number or (height, width)")
        if channels not in _MODES:
            raise ValueError(f"channels={channels!r}: expected 3 for colours, 1 for grey, or 4 with opacity")
        if undecodable not in ("stop", "skip"):
            raise ValueError(f"undecodable={undecodable!r}: expected 'stop' or 'skip'")
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads!r}: expected at least 1")
        wanted = (formats,) if isinstance(formats, str) else tuple(formats)
        if not wanted or _BY_PROGRAMS & {name.upper() for name in wanted}:
            raise ValueError(
                f"formats={formats!r}: expected some that Pillow decodes itself, such as {listed(FORMATS)}; none of "
                f"{', '.join(sorted(_BY_PROGRAMS))}, for which it starts other programs"
            )
        if max_pixels < 1:
            raise ValueError(f"max_pixels={max_pixels!r}: expected at least 1")
        self.formats, self.max_pixels = tuple(name.upper() for name in wanted), max_pixels
        _openable(self.formats)
        self.size, self.channels, self.crop = (height, width), channels, crop
        self.mean = _per_channel("mean", mean, channels, _MEAN)
        self.std = _per_channel("std", std, channels, _STD)
        if min(self.std) <= 0:
            raise ValueError(f"std={std!r}: expected numbers above 0")
        self.undecodable, self.threads = undecodable, threads
        self.skipped = 0

    def __repr__(self) -> str:
        return f"ImageDecoder({self.size}, channels={self.channels}, undecodable={self.undecodable!r})"

    def __call__(self, images: Sequence[Any]) -> torch.Tensor:
        """Decode images to one tensor.

        Args:
            images: Bytes, or mappings with the fields of Spark's image type.

        Returns:
            float32 (rows, channels, height, width); NaN for skipped images.

        Raises:
            DataError: An image cannot be decoded, and ``undecodable="stop"``.
        """
        pixels, kept = self._pixels(images, "the batch")
        tensor = self._normal(pixels)
        tensor[torch.from_numpy(~kept)] = torch.nan
        return tensor

    def collate(self, column: str, *, augment: Augment | None = None, seed: int = 0) -> Collate:
        """Return a ``collate_fn`` for ``torch_batches``: the images of a column as a tensor, other columns as usual.

        Args:
            column: Name of the column.
            augment: Random changes of images, such as :class:`ImageAugmentation`.
            seed: Seed of these changes. They follow from it and from the images of a batch, so they do not depend on
                the number of ranks and threads, and differ in each epoch if batches are shuffled.

        Returns:
            A function from a record batch to a dict of tensors. Rows of skipped images are left out, so the batch may
            have no rows.
        """

        def collated(batch: pa.RecordBatch) -> dict[str, Any]:
            images, kept = self.rows_of(batch, column, augment, seed)
            others = batch.drop_columns([column])
            others = others if kept.all() else others.filter(pa.array(kept))
            return {column: images, **(torch_batch(others) if others.num_columns else {})}

        return collated

    def rows_of(
        self, batch: pa.RecordBatch, column: str, augment: Augment | None = None, seed: int = 0
    ) -> tuple[torch.Tensor, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return the decodable images of a column, and for each row whether it is among them; see :meth:`collate`.

        Raises:
            DataError: There is no such column; an image cannot be decoded, and ``undecodable="stop"``.
        """
        if column not in batch.schema.names:
            raise DataError(f"there is no column {column!r} of images: expected one of {listed(batch.schema.names)}")
        values = batch.column(column).to_pylist()
        pixels, kept = self._pixels(values, f"the batch of column {column!r}")
        images = self._normal(pixels if kept.all() else pixels[kept])
        if augment is None:
            return images, kept
        for value in values:
            seed = zlib.crc32((value["data"] if isinstance(value, Mapping) else value) or b"", seed & 0xFFFFFFFF)
        return augment(images, torch.Generator().manual_seed(seed)), kept

    def _pixels(self, images: Sequence[Any], where: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return bytes (rows, height, width, channels), and for each row whether it could be decoded."""
        pixels = np.zeros((len(images), *self.size, self.channels), np.uint8)

        def decode(row: int) -> Exception | None:
            try:
                pixels[row] = self._decoded(images[row]).reshape(pixels.shape[1:])
            except (MemoryError, ImportError):
                raise
            except Exception as error:  # Pillow's plugins raise any exception on bytes that are not an image
                return error
            return None

        threads = min(self.threads or torch.get_num_threads(), len(images))
        of = map if threads < 2 else _pool(os.getpid(), threads).map
        wrong = {row: error for row, error in enumerate(of(decode, range(len(images)))) if error is not None}
        if wrong and self.undecodable == "stop":
            raise DataError(_undecodable(images, wrong, where))
        self.skipped += len(wrong)
        kept = np.ones(len(images), np.bool_)
        kept[list(wrong)] = False
        return pixels, kept

    def _decoded(self, value: Any) -> np.ndarray[Any, Any]:
        pillow, operations = _pillow()
        if value is None:
            raise ValueError("null")
        if isinstance(value, Mapping):
            opened = _of_spark(value)
        else:
            opened = pillow.open(io.BytesIO(value), formats=_openable(self.formats))
        with opened as image:
            if image.width * image.height > self.max_pixels:
                raise _TooLargeError(f"{image.width} x {image.height} pixels, max_pixels={self.max_pixels}")
            height, width = self.size
            least = 2 * max(height, width)  # max: the orientation is not known yet; twice: scaling averages pixels
            image.draft(None, (least, least))
            upright = _eight_bits(operations.exif_transpose(image))
            if upright.mode != _MODES[self.channels]:
                upright = upright.convert(_MODES[self.channels])
            if upright.size != (width, height):
                if self.crop:
                    upright = operations.fit(upright, (width, height), pillow.Resampling.BILINEAR)
                else:
                    upright = upright.resize((width, height), pillow.Resampling.BILINEAR)
            return np.asarray(upright)

    def _normal(self, pixels: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = (torch.tensor(each, device="cpu").view(-1, 1, 1) * 255 for each in (self.mean, self.std))
        return tensor.sub_(mean).div_(std)


class ImageAugmentation:
    """Shifts images by some pixels and mirrors half of them, at random. Call it on tensors.

    Args:
        crop_padding: Pixels of padding on each side, with the image's own edges, before a random crop of its size.
        flip: Mirror images left to right, each with a probability of one half.

    Raises:
        ValueError: ``crop_padding`` is below 0.
    """

    __module__ = "spark_hvd.data"

    def __init__(self, crop_padding: int = 4, *, flip: bool = True) -> None:
        if crop_padding < 0:
            raise ValueError(f"crop_padding={crop_padding!r}: expected pixels from 0")
        self.crop_padding, self.flip = crop_padding, flip

    def __call__(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return changed images of the same shape, (rows, channels, height, width); ``generator`` draws the changes."""
        rows, _, height, width = images.shape
        shifts = torch.randint(
            -self.crop_padding, self.crop_padding + 1, (2, rows, 1), generator=generator, device="cpu"
        )
        down = (torch.arange(height, device="cpu") + shifts[0]).clamp(
            0, height - 1
        )  # beyond an edge is the edge itself
        right = (torch.arange(width, device="cpu") + shifts[1]).clamp(0, width - 1)
        if self.flip:
            mirrored = torch.rand(rows, 1, generator=generator, device="cpu") < 0.5
            right = torch.where(mirrored, right.flip(1), right)
        row = torch.arange(rows, device="cpu")[:, None, None]
        return images[row, :, down[:, :, None], right[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _per_channel(
    name: str, value: float | Sequence[float] | None, channels: int, imagenet: Sequence[float]
) -> tuple[float, ...]:
    if value is None:
        return tuple(imagenet) if channels == 3 else (round(sum(imagenet) / 3, 3),) * channels
    values = tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),) * channels
    if len(values) != channels:
        raise ValueError(f"{name}={value!r}: expected a number, or {channels}, one for each channel")
    return values


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError(f"images need Pillow: pip install pillow ({error})") from error
    return Image, ImageOps


@functools.cache
def _openable(formats: tuple[str, ...]) -> tuple[str, ...]:
    """Return the file formats that this Pillow can read."""
    pillow, _ = _pillow()
    pillow.init()
    found = tuple(name for name in formats if name in pillow.OPEN)
    if not found:
        raise ValueError(
            f"formats={formats!r}: Pillow knows none of them; expected some of {listed(sorted(pillow.OPEN))}"
        )
    return found


class _TooLargeError(ValueError):
    pass


@functools.lru_cache(maxsize=4)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return the pool of this process; keyed by process, as threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="decode")


def _of_spark(value: Mapping[str, Any]) -> Image:
    """Return the image in a value of Spark's image type, which holds rows of pixels as in OpenCV, blue before red."""
    if value["height"] < 0:
        raise ValueError("Spark could not decode it")
    pixels = np.frombuffer(value["data"], np.uint8).reshape(value["height"], value["width"], value["nChannels"])
    order = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[value["nChannels"]]
    pixels = pixels[..., 0] if len(order) == 1 else np.ascontiguousarray(pixels[..., order])
    found: Image = _pillow()[0].fromarray(pixels)
    return found


def _eight_bits(image: Image) -> Image:
    """Return the upper bytes of 16-bit pixels, which Pillow would clip at 255."""
    if not image.mode.startswith("I;16"):
        return image
    found: Image = _pillow()[0].fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return found


def _undecodable(images: Sequence[Any], wrong: Mapping[int, Exception], where: str) -> str:
    shown = "; ".join(f"row {row}: {_description(images[row], wrong[row])}" for row in list(wrong)[:_SHOWN])
    return (
        f"{len(wrong)} of {count(len(images), 'image')} of {where} cannot be decoded. {shown}"
        f"{'; and more' if len(wrong) > _SHOWN else ''}. Next: drop such rows from the DataFrame, or pass "
        "undecodable='skip', which omits and counts them"
    )


def _description(value: Any, error: Exception) -> str:
    if not isinstance(value, bytes | bytearray | memoryview):
        return str(error)
    why = str(error) if isinstance(error, _TooLargeError) else type(error).__name__
    return f"{len(value)} bytes that begin with {bytes(value[:8])!r} ({why})"
