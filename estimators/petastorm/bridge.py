"""Lets an unmodified Petastorm 0.12 run with today's pyarrow and numpy.

A finder on ``sys.meta_path`` loads those modules of Petastorm that use removed names, and no others. While such a
module executes, stubs of the modules it imports are in ``sys.modules``; afterwards its own names are bound to
overlays. Nothing in pyarrow, numpy or pandas changes, and no other package sees a difference.

Processes that unpickle Petastorm's objects need the bridge as well. Petastorm's process pool gets it. In Spark's Python
workers, ``materialize_dataset`` installs it; wrap your own functions that use Petastorm in :func:`bridged`. For
anything else, start the session with ``spark.python.daemon.module=spark_hvd.estimators.petastorm.daemon``.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from spark_hvd.estimators.errors import EstimatorError
from spark_hvd.world.pickles import dumps

PIP = 'pip install "petastorm>=0.12.1,<0.13"'

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Need:
    rebound: tuple[str, ...] = ()
    """Names of the module that are bound to overlays."""
    stubs: tuple[str, ...] = ()
    """Stubs to put into ``sys.modules`` while it executes."""
    optional: bool = False
    """Whether the names may be missing, because what they come from need not be installed."""


_NEEDS = {
    "petastorm.utils": _Need(stubs=("pyarrow.filesystem",)),
    "petastorm.hdfs.namenode": _Need(("pyarrow",), stubs=("pyarrow.hdfs",)),
    "petastorm.spark.spark_dataset_converter": _Need(stubs=("pyarrow.LocalFileSystem",)),
    "petastorm.fs_utils": _Need(("pyarrow",)),
    "petastorm.reader": _Need(("pq",)),
    "petastorm.arrow_reader_worker": _Need(("pq", "np")),
    "petastorm.py_dict_reader_worker": _Need(("pq",)),
    "petastorm.etl.dataset_metadata": _Need(("pq",)),
    "petastorm.etl.rowgroup_indexing": _Need(("pq",)),
    "petastorm.etl.petastorm_generate_metadata": _Need(("pq",)),
    "petastorm.etl.legacy": _Need(("RestrictedUnpickler",)),
    "petastorm.unischema": _Need(("np",)),
    "petastorm.predicates": _Need(("np",)),
    "petastorm.weighted_sampling_reader": _Need(("np",)),
    "petastorm.codecs": _Need(("cv2",), optional=True),
    "petastorm.workers_pool.process_pool": _Need(("exec_in_new_process",)),
}


def install() -> None:
    """Install the bridge, unless it is installed. Call it before Petastorm is first imported.

    Raises:
        EstimatorError: Petastorm is missing, has a version that the bridge does not support, or was imported before.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    _check_versions()
    early = sorted({"petastorm", *_NEEDS} & sys.modules.keys())  # a failed import also leaves modules behind
    if early:
        raise EstimatorError(
            f"{early[0]} was imported before the bridge was installed, so it already uses names that pyarrow and "
            "numpy no longer have. Call spark_hvd.estimators.petastorm_bridge.install() before `import petastorm`."
        )
    sys.meta_path.insert(0, _Finder())


def bridged(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function``, which uses Petastorm, so that the bridge is installed before it is unpickled.

    Use this for functions that Spark's Python workers or ranks run: ``rdd.map(bridged(encode))``. spark_hvd must be
    installed there.
    """
    return _Bridged(function)


class _Bridged(Generic[P, R]):
    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[bytes], Callable[..., Any]], tuple[bytes]]:
        return _load_bridged, (dumps(self._function),)  # as bytes, unpickled only once the bridge is installed


def _load_bridged(data: bytes) -> Callable[..., Any]:
    install()
    return _Bridged(pickle.loads(data))


def _check_versions() -> None:
    try:
        found = importlib.metadata.version("petastorm")
    except importlib.metadata.PackageNotFoundError:
        raise EstimatorError(
            f"petastorm is not installed in {sys.executable}; this data set or reader needs it: {PIP}"
        ) from None
    version = tuple(int(part) if part.isdigit() else 0 for part in found.split("."))
    if version >= (0, 13):
        raise EstimatorError(
            f"petastorm {found} loses rows: a reader may take the end of ventilation for the end of the data and drop "
            f"the last row groups, silently. Use the version before: {PIP}"
        )
    if version < (0, 12, 1):
        raise EstimatorError(f"petastorm {found} is older than the version that the bridge supports: {PIP}")
    pandas = importlib.metadata.version("pandas")
    if int(pandas.split(".")[0]) >= 3:
        raise EstimatorError(
            f'petastorm with pandas {pandas} reads null strings as the text "nan", silently: pip install "pandas<3"'
        )


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _NEEDS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # tracebacks and inspect ask loaders for the source

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        created: types.ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: types.ModuleType) -> None:
        from spark_hvd.estimators.petastorm import overlays as petastorm_overlays

        need = _NEEDS[module.__name__]
        with _standing_in({name: petastorm_overlays.STUBS[name] for name in need.stubs}):
            self._inner.exec_module(module)
        missing = [name for name in need.rebound if name not in vars(module)]
        if not missing:
            vars(module).update(petastorm_overlays.replacements(module, need.rebound))
        elif not need.optional:
            raise EstimatorError(
                f"{module.__name__} has no {', '.join(missing)}, so it is not the Petastorm that the bridge "
                f"supports. Install an unmodified one: {PIP}"
            )


@contextmanager
def _standing_in(stubs: dict[str, Any]) -> Iterator[None]:
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
