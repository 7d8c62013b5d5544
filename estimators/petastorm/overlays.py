"""Replacements for names that pyarrow and numpy have removed, for Petastorm's modules. Loaded with Petastorm only."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import types
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import partial
from tempfile import mkstemp
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

from spark_hvd.estimators.petastorm.bridge import install
from spark_hvd.estimators.petastorm.parquet import ParquetDataset, ParquetDatasetPiece


class Overlay:
    """A module with some names added; the module itself is not changed.

    Petastorm's closures carry their module's globals to Spark's workers. So an overlay is pickled as its name, and
    unpickling it installs the bridge there.
    """

    def __init__(self, name: str, base: types.ModuleType, added: Mapping[str, Any]) -> None:
        self._name, self._base, self._added = name, base, dict(added)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._added[name] if name in self._added else getattr(self._base, name)

    def __reduce__(self) -> tuple[Callable[[str], Overlay], tuple[str]]:
        return _overlay, (self._name,)


def _overlay(name: str) -> Overlay:
    install()
    return OVERLAYS[name]


def _in1d(values: Any, wanted: Any) -> Any:
    return np.isin(np.asarray(values).ravel(), wanted)


def _encode_image(encode: Callable[..., Any], extension: str, image: Any, parameters: Any = ()) -> Any:
    """Call OpenCV's encoder with the quality for JPEG only: version 5 warns about it for other formats."""
    return encode(extension, image, parameters if extension.lower() in (".jpg", ".jpeg", ".jpe") else ())


def _connect_hdfs(host: str, port: int, user: str | None = None) -> ArrowFSWrapper:
    return ArrowFSWrapper(pyarrow.fs.HadoopFileSystem(host, port, user=user))


OVERLAYS = {
    "numpy": Overlay("numpy", np, {"unicode_": np.str_, "string_": np.bytes_, "float": float, "in1d": _in1d}),
    "pyarrow": Overlay(
        "pyarrow", pa, {"localfs": fsspec.filesystem("file"), "hdfs": types.SimpleNamespace(connect=_connect_hdfs)}
    ),
    "pyarrow.parquet": Overlay(
        "pyarrow.parquet", pq, {"ParquetDataset": ParquetDataset, "ParquetDatasetPiece": ParquetDatasetPiece}
    ),
}


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    return module


# Petastorm derives a class from this, and replaces its public methods by name with calls of a connected file system.
_HadoopFileSystem = type(
    "HadoopFileSystem",
    (),
    {
        name: method
        for name, method in vars(fsspec.AbstractFileSystem).items()
        if isinstance(method, types.FunctionType) and not name.startswith("_")
    },
)

STUBS: dict[str, Any] = {
    "pyarrow.filesystem": _module("pyarrow.filesystem", LocalFileSystem=LocalFileSystem),
    "pyarrow.hdfs": _module("pyarrow.hdfs", HadoopFileSystem=_HadoopFileSystem),
    # `from pyarrow import LocalFileSystem` looks here, because pyarrow has no such name
    "pyarrow.LocalFileSystem": LocalFileSystem,
}
"""Entries of ``sys.modules`` that exist while a module that imports them executes."""


def launch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
    """Run a function in a new interpreter that has the bridge; replaces ``exec_in_new_process``."""
    import dill  # type: ignore[import-untyped]

    handle, path = mkstemp(prefix="spark_hvd-", suffix=".dill")
    with os.fdopen(handle, "wb") as file:
        pickle.dump(sys.path, file)  # this package may have come as files that only sys.path knows
        dill.dump((function, args, kwargs), file)
    code = (
        # -c searches the working directory first, which others may be able to write to.
        "import sys; sys.path = [entry for entry in sys.path if entry]; "
        "import pickle; file = open(sys.argv[1], 'rb'); sys.path[:] = pickle.load(file); "
        "from spark_hvd.estimators.petastorm.overlays import run_launched; run_launched(file)"
    )
    return subprocess.Popen([sys.executable, "-c", code, path])


def run_launched(file: Any) -> None:
    """Run the function in the new interpreter; the other end of :func:`launch`."""
    import dill

    install()
    with file:
        function, args, kwargs = dill.load(file)
    os.remove(file.name)
    function(*args, **kwargs)


def legacy_unpickler(base: type[Any]) -> type[Any]:
    """Extend ``base``, Petastorm's restricted unpickler, to names in schemas of years ago."""
    moved = {("numpy", name): value for name, value in OVERLAYS["numpy"]._added.items() if isinstance(value, type)}

    class LegacyUnpickler(base):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == ("pyspark.serializers", "_restore"):
                return _restore
            return moved.get((module, name)) or super().find_class(module, name)

    return LegacyUnpickler


def _restore(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """Restore a named tuple, which old versions of pyspark pickled by value."""
    if name == "UnischemaField":
        from petastorm.unischema import UnischemaField

        return UnischemaField(**dict(zip(fields, values, strict=True)))
    return namedtuple(name, fields)(*values)


def replacements(module: types.ModuleType, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the overlay for each of ``names`` in ``module``, to be bound once the module has executed."""
    named: dict[str, Callable[[], Any]] = {
        "np": lambda: OVERLAYS["numpy"],
        "pyarrow": lambda: OVERLAYS["pyarrow"],
        "pq": lambda: OVERLAYS["pyarrow.parquet"],
        "cv2": lambda: Overlay("cv2", module.cv2, {"imencode": partial(_encode_image, module.cv2.imencode)}),
        "exec_in_new_process": lambda: launch,
        "RestrictedUnpickler": lambda: legacy_unpickler(module.RestrictedUnpickler),
    }
    return {name: named[name]() for name in names}
