"""Launchers of others by their own names: programs for PySpark's TorchDistributor and Databricks' HorovodRunner.

Names are loaded on first use: ranks take their rows from here too, and load nothing of the driver's.
"""

from typing import TYPE_CHECKING

from spark_hvd.world.lazy import names_of

if TYPE_CHECKING:
    from spark_hvd.runner.compat.horovod_runner import HorovodRunner
    from spark_hvd.runner.compat.partition import get_spark_partition_data_loader
    from spark_hvd.runner.compat.torch_distributor import TorchDistributor

__all__ = ["HorovodRunner", "TorchDistributor", "get_spark_partition_data_loader"]

__getattr__, __dir__ = names_of(
    __name__,
    {
        "runner.compat.horovod_runner": "HorovodRunner",
        "runner.compat.partition": "get_spark_partition_data_loader",
        "runner.compat.torch_distributor": "TorchDistributor",
    },
)
