"""The table of names: which module of ``horovod`` consists of which of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PAGE = "docs/migrating-from-horovod.md"


@dataclass(frozen=True, slots=True)
class Served:
    """The source of a module of ``horovod``.

    Attributes:
        home: Our module that has its names; it is loaded with the module. None: only ``names`` are available.
        names: Further names, which take precedence: each with the module and the attribute that it stands for.
    """

    home: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)


def _at(module: str, *names: str, **others: str) -> dict[str, str]:
    """Map names to attributes of a module: ``names`` are called the same there, ``others`` have other names."""
    return {name: f"{module}:{there}" for name, there in {**{name: name for name in names}, **others}.items()}


_START = _at("spark_hvd.horovod.start", "init")
_ERRORS = _at("spark_hvd.world.errors", "HostsUpdatedInterrupt", HorovodInternalError="CollectiveError")
_SETS = _at("spark_hvd.collectives.process_set", "ProcessSet", "global_process_set") | _at(
    "spark_hvd.context.register", "add_process_set", "remove_process_set"
)
_OLD = _at("spark_hvd.torch.reduce", handle_average_backwards_compatibility="chosen_op") | _at(
    "spark_hvd.horovod.util", check_num_rank_power_of_2="num_rank_is_power_2"
)
_LOADERS = Served(names=_at("spark_hvd.horovod.loaders", "AsyncDataLoaderMixin", "BaseDataLoader"))
_LAUNCHERS = "spark_hvd.runner.compat.horovod"
_TORCH, _TENSORFLOW, _KERAS = "spark_hvd.torch", "spark_hvd.tensorflow", "spark_hvd.keras"
_RUN = _at(_LAUNCHERS, run="run_here")
_UTIL = "check_extension extension_available gpu_available env split_list is_iterable is_version_greater_equal_than"
_BUILT = "mpi_built gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built"
_STORES = (
    _at("spark_hvd.store", "Store")
    | _at("spark_hvd.horovod.stores", "HDFSStore")
    | dict.fromkeys(("LocalStore", "FilesystemStore", "DBFSLocalStore"), "spark_hvd.horovod.stores:FilesystemStore")
)
_BACKENDS = _at("spark_hvd.estimators.fit.backend", "Backend", "LocalBackend") | _at(
    "spark_hvd.horovod.util", SparkBackend="spark_backend"
)
_ESTIMATORS = "spark_hvd.estimators"
_GRAPH = _at("tensorflow", _executing_eagerly="executing_eagerly")
_KERAS_FACE = Served(_KERAS, _START)

TABLE: Mapping[str, Served] = {
    "horovod": Served(names=_RUN | _at("spark_hvd.horovod.util", __version__="VERSION")),
    "horovod.run": Served(names=_RUN),
    "horovod.runner": Served(names=_RUN),
    "horovod.torch": Served(_TORCH, _START),
    "horovod.torch.mpi_ops": Served(_TORCH, _START | _OLD),
    "horovod.torch.functions": Served(_TORCH),
    "horovod.torch.compression": Served(_TORCH),
    "horovod.torch.optimizer": Served(_TORCH),
    "horovod.torch.sync_batch_norm": Served(_TORCH),
    "horovod.torch.elastic": Served("spark_hvd.torch.elastic"),
    "horovod.torch.elastic.state": Served("spark_hvd.torch.elastic"),
    "horovod.torch.elastic.sampler": Served("spark_hvd.torch.elastic"),
    "horovod.tensorflow": Served(_TENSORFLOW, _START | _OLD | _GRAPH),
    "horovod.tensorflow.mpi_ops": Served(_TENSORFLOW, _START | _OLD),
    "horovod.tensorflow.functions": Served(_TENSORFLOW),
    "horovod.tensorflow.compression": Served(_TENSORFLOW),
    "horovod.tensorflow.sync_batch_norm": Served(_TENSORFLOW),
    "horovod.tensorflow.util": Served(names=_GRAPH),
    "horovod.tensorflow.elastic": Served("spark_hvd.tensorflow.elastic"),
    "horovod.tensorflow.keras": _KERAS_FACE,
    "horovod.tensorflow.keras.callbacks": Served("spark_hvd.keras.callbacks"),
    "horovod.tensorflow.keras.elastic": Served("spark_hvd.keras.elastic"),
    "horovod.keras": _KERAS_FACE,
    "horovod.keras.callbacks": Served("spark_hvd.keras.callbacks"),
    "horovod.keras.elastic": Served("spark_hvd.keras.elastic"),
    "horovod.mxnet": Served("spark_hvd.mxnet", _START),
    "horovod.common": Served(),
    "horovod.common.elastic": Served(names=_at("spark_hvd.elastic.state", "State", "ObjectState")),
    "horovod.common.exceptions": Served(names=_ERRORS | _at("builtins", HorovodVersionMismatchError="ImportError")),
    "horovod.common.process_sets": Served(names=_SETS),
    "horovod.common.util": Served(
        names=_at("spark_hvd.horovod.util", *_UTIL.split(), *_BUILT.split(), "num_rank_is_power_2")
        | _at("functools", _cache="cache")
    ),
    "horovod.data": _LOADERS,
    "horovod.data.data_loader_base": _LOADERS,
    "horovod.spark": Served(names=_at(_LAUNCHERS, run="run_on_spark", run_elastic="run_elastic_on_spark")),
    "horovod.spark.runner": Served(names=_at(_LAUNCHERS, run="run_on_spark", run_elastic="run_elastic_on_spark")),
    "horovod.spark.conf": Served("spark_hvd.horovod.spark_conf"),
    "horovod.spark.task": Served(names=_at("spark_hvd.horovod.util", "get_available_devices")),
    "horovod.spark.torch": Served(names=_at(_ESTIMATORS, "TorchEstimator", "TorchModel")),
    "horovod.spark.torch.estimator": Served(names=_at(_ESTIMATORS, "TorchEstimator", "TorchModel")),
    "horovod.spark.lightning": Served(
        names=_at(f"{_ESTIMATORS}.lightning.horovod", TorchEstimator="HorovodEstimator", TorchModel="HorovodModel")
    ),
    "horovod.spark.lightning.estimator": Served(
        names=_at(f"{_ESTIMATORS}.lightning.horovod", TorchEstimator="HorovodEstimator", TorchModel="HorovodModel")
    ),
    "horovod.spark.keras": Served(names=_at(_ESTIMATORS, "KerasEstimator", "KerasModel")),
    "horovod.spark.keras.estimator": Served(names=_at(_ESTIMATORS, "KerasEstimator", "KerasModel")),
    "horovod.spark.common": Served(),
    "horovod.spark.common.backend": Served(names=_BACKENDS),
    "horovod.spark.common.store": Served(names=_STORES),
    "horovod.spark.common.estimator": Served(
        names=_at(f"{_ESTIMATORS}.fit.estimator", HorovodEstimator="SparkEstimator")
    ),
    "horovod.spark.common.util": Served(
        names=_at("spark_hvd.horovod.util", "to_list", "host_hash")
        | _at("spark_hvd.horovod.stores", "prepare_data")
        | _at(f"{_ESTIMATORS}.data.reuse", clear_training_cache="clear_materialized_data")
    ),
}

REFUSED: Mapping[str, str] = {
    "horovod.mxnet": "MXNet, retired in 2023, needs an environment of its own, see docs/api/mxnet.md",
    "horovod.common.basics": "use horovod.torch, such as hvd.size(): there is no library to load",
    "horovod.ray": "Spark starts the ranks: use horovod.spark.run, or spark-hvd run",
    "horovod.tensorflow.data": "tf.data's service is not started here: rows reach ranks by run(data=...), docs/data.md",
    "horovod.spark.tensorflow": "tf.data's service is not started: rows reach ranks by run(data=...), docs/data.md",
    "horovod.spark.driver": "drivers and tasks do not use Horovod's messages here",
    "horovod.spark.gloo_run": "use horovod.spark.run",
    "horovod.spark.mpi_run": 'use horovod.spark.run(use_mpi=True), or spark_hvd.run(backend="mpi")',
    "horovod.spark.data_loaders": "a rank gets its rows by run(data=...), docs/data.md",
    "horovod.spark.keras.datamodule": "NVTabular is not supported",
    "horovod.spark.torch.datamodule": "NVTabular is not supported",
    "horovod.spark.lightning.datamodule": "NVTabular is not supported",
}
"""Modules of Horovod that are missing or need something, with the reason or an alternative."""
