"""The rows that a rank trains on, for any framework.

May import the context and what is below it, store, its own readers, series and feeders; no pyspark. Doors: handed,
shard, spool. Names are loaded when they are asked for: a Spark task that keeps rows on its disk needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_hvd.data.columns import padded, ragged
    from spark_hvd.data.feeders.mapping import Mapped
    from spark_hvd.data.handed import get_dataset_shard
    from spark_hvd.data.images import ImageAugmentation, ImageDecoder
    from spark_hvd.data.loader import ShardLoader, TorchLoader
    from spark_hvd.data.series.windows import Windows
    from spark_hvd.data.shard import DatasetShard

_HOMES = {
    "DatasetShard": "shard",
    "ImageAugmentation": "images",
    "ImageDecoder": "images",
    "Mapped": "feeders.mapping",
    "ShardLoader": "loader",
    "TorchLoader": "loader",
    "Windows": "series.windows",
    "get_dataset_shard": "handed",
    "padded": "columns",
    "ragged": "columns",
}

__all__ = [
    "DatasetShard",
    "ImageAugmentation",
    "ImageDecoder",
    "Mapped",
    "ShardLoader",
    "TorchLoader",
    "Windows",
    "get_dataset_shard",
    "padded",
    "ragged",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"spark_hvd.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
