"""Image bytes become tensors: Pillow's pixels; random, but the same each time; or an error."""

from __future__ import annotations

import io
import pickle
import subprocess
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageFile

from spark_hvd import DataError
from spark_hvd.data import ImageAugmentation, ImageDecoder

RAW: dict[str, Any] = {"mean": 0.0, "std": 1.0}


def picture(mode: str = "RGB", width: int = 12, height: int = 8, seed: int = 0) -> Image.Image:
    bands = {"RGB": (3,), "RGBA": (4,), "L": (), "I;16": ()}[mode]
    kind = np.uint16 if mode == "I;16" else np.uint8
    pixels = np.random.default_rng(seed).integers(0, np.iinfo(kind).max, (height, width, *bands), kind)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return an array (rows, height, width, channels), 0 to 255."""
    return (tensor.permute(0, 2, 3, 1) * 255).round().byte().numpy()


@pytest.mark.parametrize("threads", [1, 3])
def test_png_is_what_pillow_sees(threads: int) -> None:
    images = [picture(mode, seed=seed) for seed, mode in enumerate(["RGB", "L", "RGBA"])]
    decoder = ImageDecoder((8, 12), threads=threads, **RAW)
    tensor = decoder([encoded(image) for image in images])
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 3, 8, 12), torch.float32, True)
    for found, image in zip(bytes_of(tensor), images, strict=True):
        np.testing.assert_array_equal(found, np.asarray(image.convert("RGB")))
    again = pickle.loads(pickle.dumps(decoder))
    torch.testing.assert_close(again([encoded(image) for image in images]), tensor, rtol=0, atol=0)


def test_channels_and_normalisation() -> None:
    colour, grey = picture(), picture("L")
    one = ImageDecoder((8, 12), channels=1, **RAW)
    np.testing.assert_array_equal(bytes_of(one([encoded(grey)]))[0, ..., 0], np.asarray(grey))
    np.testing.assert_array_equal(bytes_of(one([encoded(colour)]))[0, ..., 0], np.asarray(colour.convert("L")))
    four = ImageDecoder((8, 12), channels=4, **RAW)
    np.testing.assert_array_equal(bytes_of(four([encoded(colour)]))[0, ..., 3], 255)
    deep = picture("I;16")  # 16 bits of grey, as from microscopes and scanners
    np.testing.assert_array_equal(bytes_of(one([encoded(deep)]))[0, ..., 0], np.asarray(deep) >> 8)

    red = np.asarray(colour)[0, 0, 0] / 255
    assert ImageDecoder((8, 12))([encoded(colour)])[0, 0, 0, 0].item() == pytest.approx((red - 0.485) / 0.229, abs=1e-5)
    own = ImageDecoder((8, 12), mean=[0.5, 0, 0], std=0.25)([encoded(colour)])
    assert own[0, 0, 0, 0].item() == pytest.approx((red - 0.5) / 0.25, abs=1e-5)


def test_sizes_jpeg_and_the_way_up() -> None:
    # smooth, so that JPEG's losses do not matter
    across = np.broadcast_to(np.linspace(0, 255, 400)[None, :, None], (200, 400, 3)).astype(np.uint8)
    image = Image.fromarray(across)
    middle, whole = ImageDecoder(20, **RAW), ImageDecoder(20, crop=False, **RAW)
    for content in (encoded(image), encoded(image, "JPEG", quality=95)):
        cut, stretched = bytes_of(middle([content]))[0], bytes_of(whole([content]))[0]
        assert (abs(cut[10, [0, -1], 0].astype(int) - [67, 188]) <= 3).all(), (
            "the middle: a quarter is off on each side"
        )
        assert (abs(stretched[10, [0, -1], 0].astype(int) - [6, 249]) <= 3).all()
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned = bytes_of(whole([encoded(image, "JPEG", quality=95, exif=exif)]))[0]
    assert (abs(turned[10, [0, -1], 0].astype(int) - [249, 6]) <= 3).all()


def test_sparks_image_type() -> None:
    colour, grey = picture("RGBA"), picture("L")
    blue_first = np.asarray(colour)[..., [2, 1, 0, 3]]
    values: list[dict[str, Any]] = [
        {"height": 8, "width": 12, "nChannels": 4, "mode": 24, "data": blue_first.tobytes()},
        {"height": 8, "width": 12, "nChannels": 1, "mode": 0, "data": np.asarray(grey).tobytes()},
    ]
    decoder = ImageDecoder((8, 12), undecodable="skip", **RAW)
    found = bytes_of(decoder(values))
    np.testing.assert_array_equal(found[0], np.asarray(colour.convert("RGB")))
    np.testing.assert_array_equal(found[1], np.asarray(grey.convert("RGB")))
    lost = {"height": -1, "width": -1, "nChannels": -1, "mode": -1, "data": b""}
    assert decoder([lost]).isnan().all()
    with pytest.raises(DataError, match="row 0: Spark could not decode it"):
        ImageDecoder(8)([lost])


GOOD = encoded(picture())
BAD = [b"no image", b"", GOOD[:60], GOOD[:20] + bytes(40) + GOOD[60:], None]


def test_undecodable_stops() -> None:
    with pytest.raises(DataError) as error:
        ImageDecoder(8)([GOOD, *BAD, GOOD])
    said = str(error.value)
    assert "5 of 7 images of the batch cannot be decoded" in said
    assert "row 1: 8 bytes that begin with b'no image' (UnidentifiedImageError)" in said
    assert "; and more. Next: drop such rows from the DataFrame, or pass undecodable='skip'" in said


def test_undecodable_skipped_and_counted() -> None:
    decoder = ImageDecoder((8, 12), undecodable="skip", threads=2)
    tensor = decoder([GOOD, *BAD, GOOD])
    assert decoder.skipped == 5
    assert tensor.isnan().flatten(1).all(1).tolist() == [False, *[True] * 5, False]
    torch.testing.assert_close(tensor[0], tensor[6], rtol=0, atol=0)

    batch = pa.record_batch({"image": [GOOD, *BAD], "label": list(range(6))})
    found = decoder.collate("image")(batch)
    assert decoder.skipped == 10
    torch.testing.assert_close(found["image"], tensor[:1], rtol=0, atol=0)
    assert found["label"].tolist() == [0]
    none = decoder.collate("image", augment=ImageAugmentation())(batch.slice(1))
    assert (none["image"].shape, none["label"].shape) == ((0, 3, 8, 12), (0,))
    with pytest.raises(DataError, match=r"no column 'photo' of images: expected one of 'image', 'label'"):
        decoder.collate("photo")(batch)


def test_augmentation_is_random_and_comes_again() -> None:
    image = torch.arange(24.0).view(1, 1, 4, 6)
    many = image.expand(4000, 1, 4, 6)

    def drawn(seed: int, **options: Any) -> torch.Tensor:
        return ImageAugmentation(**options)(many, torch.Generator().manual_seed(seed))

    torch.testing.assert_close(drawn(1), drawn(1), rtol=0, atol=0)
    assert not torch.equal(drawn(1), drawn(2))
    for augmented in (drawn(1, crop_padding=1, flip=True), drawn(1, crop_padding=1, flip=False)):
        assert augmented.shape == many.shape
        assert augmented.is_contiguous()
    wide = np.pad(image[0, 0].numpy(), 1, "edge")
    cuts = [wide[down : down + 4, right : right + 6] for down in range(3) for right in range(3)]
    expected = {cut.tobytes() for each in cuts for cut in (each, each[:, ::-1])}
    assert {each.numpy().tobytes() for each in drawn(1, crop_padding=1, flip=True)} == expected
    assert {each.numpy().tobytes() for each in drawn(1, crop_padding=1, flip=False)} == {c.tobytes() for c in cuts}
    mirrored = drawn(1, crop_padding=0, flip=True)[:, 0, 0, 0] == 5
    assert 1800 < mirrored.sum() < 2200
    torch.testing.assert_close(drawn(1, crop_padding=0, flip=False), many, rtol=0, atol=0)


def test_batches_are_augmented_by_seed_and_images() -> None:
    batch = pa.record_batch({"image": [encoded(picture(seed=seed)) for seed in range(8)]})

    def augmented(batch: pa.RecordBatch, seed: int) -> torch.Tensor:
        found = ImageDecoder((8, 12)).collate("image", augment=ImageAugmentation(3), seed=seed)(batch)["image"]
        assert isinstance(found, torch.Tensor)
        return found

    torch.testing.assert_close(augmented(batch, 1), augmented(batch, 1), rtol=0, atol=0)
    assert not torch.equal(augmented(batch, 1), augmented(batch, 2))
    turned = batch.take(pa.array(range(7, -1, -1)))
    assert not torch.equal(augmented(batch, 1), augmented(turned, 1).flip(0)), "another batch, other draws"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"size": 0}, r"size=0: expected pixels from 1"),
        ({"size": 8, "channels": 2}, r"channels=2: expected 3 for colours"),
        ({"size": 8, "mean": [0.5]}, r"mean=\[0.5\]: expected a number, or 3"),
        ({"size": 8, "std": 0}, r"std=0: expected numbers above 0"),
        ({"size": 8, "undecodable": "ignore"}, r"undecodable='ignore': expected 'stop' or 'skip'"),
        ({"size": 8, "threads": 0}, r"threads=0: expected at least 1"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ImageDecoder(**arguments)
    with pytest.raises(ValueError, match=r"crop_padding=-1: expected pixels from 0"):
        ImageAugmentation(-1)


def test_only_named_formats_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(DataError, match=r"begin with b'%!PS-Ado' \(UnidentifiedImageError\)"):
        ImageDecoder(4)([eps])
    file = io.BytesIO()
    Image.new("RGB", (3, 3)).save(file, "GIF")
    with pytest.raises(DataError, match="UnidentifiedImageError"):
        ImageDecoder(4, formats=["png", "jpeg"])([file.getvalue()])
    assert ImageDecoder(4, formats="gif")([file.getvalue()]).shape == (1, 3, 4, 4)
    with pytest.raises(ValueError, match="expected some that Pillow decodes itself"):
        ImageDecoder(4, formats=["PNG", "eps"])
    with pytest.raises(ValueError, match="Pillow knows none of them"):
        ImageDecoder(4, formats=["NOPE"])


def test_images_that_say_they_are_large_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.new("L", (300, 200)).save(file, "PNG")
    assert ImageDecoder(4, max_pixels=60_000)([file.getvalue()]).shape == (1, 3, 4, 4)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(DataError, match="300 x 200 pixels, max_pixels=59999"):
        ImageDecoder(4, max_pixels=59_999)([file.getvalue()])
    with pytest.raises(ValueError, match="max_pixels=0"):
        ImageDecoder(4, max_pixels=0)
