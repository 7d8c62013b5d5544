"""Distributed deep learning on Spark: ``spark_hvd.run``, ``import spark_hvd.torch as hvd``, ``spark_hvd.predict``."""

from typing import TYPE_CHECKING

from spark_hvd.world.lazy import names_of

if TYPE_CHECKING:
    from spark_hvd.data.readers.errors import DataError
    from spark_hvd.estimators.inference.function import predict
    from spark_hvd.runner import Network, Reporting, doctor, run, run_elastic, run_elastic_local, run_local, warm_up
    from spark_hvd.world.errors import (
        CollectiveError,
        DuplicateNameError,
        HostsUpdatedInterrupt,
        MismatchError,
        NotInitializedError,
        PlanMismatchError,
        StalledError,
    )

__version__ = "0.1.0"

__all__ = [
    "CollectiveError",
    "DataError",
    "DuplicateNameError",
    "HostsUpdatedInterrupt",
    "MismatchError",
    "Network",
    "NotInitializedError",
    "PlanMismatchError",
    "Reporting",
    "StalledError",
    "__version__",
    "doctor",
    "predict",
    "run",
    "run_elastic",
    "run_elastic_local",
    "run_local",
    "warm_up",
]

# The launchers import pyspark; a rank that imports the collectives does not.
__getattr__, __dir__ = names_of(
    __name__,
    {
        "data.readers.errors": "DataError",
        "estimators": "predict",
        "runner": "Network Reporting doctor run run_elastic run_elastic_local run_local warm_up",
        "world.errors": "CollectiveError DuplicateNameError HostsUpdatedInterrupt MismatchError NotInitializedError "
        "PlanMismatchError StalledError",
    },
)
