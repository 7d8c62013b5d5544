"""The rows that a rank trains on, for any framework.

May import the context and what is below it, store, its own readers, series and feeders; no pyspark. Doors: registry,
shard, spool. Names are loaded on first use, because a Spark task that only keeps rows on its disk needs no torch.
"""

from typing import TYPE_CHECKING

from spark_hvd.world.lazy import names_of

if TYPE_CHECKING:
    from spark_hvd.data.columns import padded, ragged
    from spark_hvd.data.feeders.mapping import Mapped
    from spark_hvd.data.images import ImageAugmentation, ImageDecoder
    from spark_hvd.data.loader import ShardLoader, TorchLoader
    from spark_hvd.data.registry import get_dataset_shard
    from spark_hvd.data.series.windows import Windows
    from spark_hvd.data.shard import DatasetShard

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

__getattr__, __dir__ = names_of(
    __name__,
    {
        "data.columns": "padded ragged",
        "data.feeders.mapping": "Mapped",
        "data.images": "ImageAugmentation ImageDecoder",
        "data.loader": "ShardLoader TorchLoader",
        "data.registry": "get_dataset_shard",
        "data.series.windows": "Windows",
        "data.shard": "DatasetShard",
    },
)
