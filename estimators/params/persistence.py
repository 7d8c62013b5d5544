"""Saves and loads objects that have a table of parameters: plain values as JSON, others as pickle and safetensors.

    <path>/metadata              one line of JSON, written by Spark: class, uid, versions, plain parameters
    <path>/structure.pkl         the objects without their weights (code: only load what you trust)
    <path>/weights.safetensors   the weights, readable without Spark and without this package

The metadata is written last and holds the other files' digests, so that truncated or mixed files are detected.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import SparkSession

import spark_hvd
from spark_hvd.estimators.params.params import TableParams
from spark_hvd.estimators.training.packing import PackedModule, pack, unpack
from spark_hvd.runner.spark import private as spark_private
from spark_hvd.runner.spark.session import is_connect
from spark_hvd.store import Store
from spark_hvd.store.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT_VERSION = 1
STRUCTURE, WEIGHTS = "structure.pkl", "weights.safetensors"
T = TypeVar("T", bound="SavedParams")


class ParamsWriter(MLWriter):
    """Saves the parameters that are set on ``instance``, and its defaults."""

    def __init__(self, instance: SavedParams) -> None:
        super().__init__()
        self._instance = instance

    def save(self, path: str) -> None:
        """Save to ``path``: a local path, or a URL that both Spark and fsspec know.

        Raises:
            StoreError: The path exists and ``overwrite()`` was not called, or the path cannot be written.
            UnpicklableError: A value cannot be pickled. The message names the attribute.
        """
        instance = self._instance
        values, defaults = (
            {name: value for name, value in params.items() if name not in instance._not_saved}
            for params in spark_private.values_and_defaults(instance)
        )
        plain = {
            name: value.to_json() if value is not None and name in instance._from_json else value
            for name, value in values.items()
        }
        objects = {name: value for name, value in values.items() if not _is_plain(plain[name])}
        packed = pack(instance._before_saving(objects), type(instance).__name__)
        store = Store.create(_qualified(path, self.sparkSession))
        if self.shouldOverwrite:
            store.delete(store.url)
        elif store.exists(store.url):
            raise StoreError(f"cannot save to {path}: it already exists; replace it with write().overwrite()")
        store.write_bytes(store.join(WEIGHTS), packed.weights)
        store.write_bytes(store.join(STRUCTURE), packed.structure)
        metadata = {
            "class": f"{type(instance).__module__}.{type(instance).__name__}",
            "timestamp": round(time.time() * 1000),
            "sparkVersion": self.sparkSession.version,
            "uid": instance.uid,
            "paramMap": {name: value for name, value in plain.items() if name not in objects},
            "defaultParamMap": {name: value for name, value in defaults.items() if _is_plain(value)},
            "format_version": FORMAT_VERSION,
            "spark_hvd": spark_hvd.__version__,
            "torch": torch.__version__,
            "sha256": {STRUCTURE: _sha256(packed.structure), WEIGHTS: _sha256(packed.weights)},
        }
        line = json.dumps(metadata, separators=(",", ":"))
        self.sparkSession.createDataFrame([(line,)], ["value"]).coalesce(1).write.text(f"{path.rstrip('/')}/metadata")


class ParamsReader(MLReader[Any], Generic[T]):
    """Makes a new ``cls`` from the parameters that a :class:`ParamsWriter` saved."""

    def __init__(self, cls: type[T]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> T:
        """Load from ``path``.

        Raises:
            CheckpointError: It is missing or damaged, has a newer format, or needs code that is not installed.
        """
        cls, spark = self._cls, self.sparkSession
        metadata = _metadata(cls, path, spark)
        store = Store.create(_qualified(path, spark))
        packed = PackedModule(*(_file(store, name, metadata["sha256"][name]) for name in (STRUCTURE, WEIGHTS)))
        instance = cls()
        spark_private.rename(instance, metadata["uid"])
        plain = metadata["paramMap"]
        plain |= {name: from_json(plain[name]) for name, from_json in cls._from_json.items() if name in plain}
        known = {row.name for row in cls._table}  # the parameters of other versions may no longer exist
        defaults = {name: value for name, value in metadata["defaultParamMap"].items() if name in known}
        spark_private.set_defaults(instance, defaults)
        instance.setParams(**plain, **cls._after_loading(_unpacked(packed, store.join(STRUCTURE), metadata)))
        return instance


class SavedParams(TableParams, MLWritable, MLReadable[Any]):
    """A table of parameters that can be saved and loaded."""

    _not_saved: ClassVar[Collection[str]] = ()

    def write(self) -> ParamsWriter:
        """Return a writer: ``write().overwrite().save(path)``."""
        return ParamsWriter(self)

    @classmethod
    def read(cls) -> ParamsReader[Self]:
        """Return a reader: ``read().load(path)``."""
        return ParamsReader(cls)

    def _before_saving(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Return what to pickle for parameters that JSON cannot hold, by name."""
        return objects

    @classmethod
    def _after_loading(cls, objects: dict[str, Any]) -> dict[str, Any]:
        """Do the inverse of :meth:`_before_saving`."""
        return objects


def _metadata(cls: type[TableParams], path: str, spark: SparkSession) -> dict[str, Any]:
    from pyspark.errors import PySparkException

    file = f"{path.rstrip('/')}/metadata"
    try:
        row = spark.read.text(file).head()
        metadata: dict[str, Any] = json.loads(row[0] if row else "")
        saved_class, version = metadata["class"], metadata["format_version"]
    except PySparkException as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"cannot read {file}: {reason}. Expected a saved {cls.__name__} at {path}.") from error
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{file} is truncated, or was not written by spark_hvd ({type(error).__name__}: {error}): save the "
            f"{cls.__name__} again"
        ) from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, written by spark_hvd {metadata.get('spark_hvd')}; this is spark_hvd "
            f"{spark_hvd.__version__}, which reads up to {FORMAT_VERSION}: install a newer spark_hvd"
        )
    # A class with the table of its base, such as those of horovod.spark.lightning, also loads what the base saved.
    names = {each.__name__ for each in cls.__mro__ if getattr(each, "_table", None) is cls._table}
    if saved_class.rpartition(".")[2] not in names:
        raise CheckpointError(f"{path} holds a {saved_class}, not a {cls.__name__}: load it with that class")
    return metadata


def _file(store: Store, name: str, sha256: str) -> bytes:
    path = store.join(name)
    try:
        content = store.read_bytes(path)
    except StoreError as error:
        raise CheckpointError(f"{path} is missing or cannot be read ({error}): copy or save the model again") from error
    if _sha256(content) != sha256:
        raise CheckpointError(f"{path} is damaged: its {len(content)} bytes are not as saved; copy or save it again")
    return content


def _unpacked(packed: PackedModule, path: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    origin = f"saved with torch {metadata.get('torch')}, spark_hvd {metadata.get('spark_hvd')}"
    try:
        objects: dict[str, Any] = unpack(packed)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path} needs the module {error.name!r}, which is not installed here ({origin})"
        ) from error
    except (AttributeError, ImportError, pickle.UnpicklingError, TypeError) as error:
        raise CheckpointError(
            f"{path} does not fit the code that is installed here ({origin}): {error}. Install the version of that "
            "module with which it was saved."
        ) from error
    return objects


def _qualified(path: str, spark: SparkSession) -> str:
    """Return ``path`` as a URL of the file system that Spark would use: "/models" may be on HDFS."""
    return path if is_connect(spark) else spark_private.qualified(spark, path)


def _is_plain(value: Any) -> bool:
    """Return whether JSON can hold the value; tuples become lists, which checks also accept."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
