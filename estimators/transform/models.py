"""The model in a Python worker: loaded once, with its weights in a file whose pages the executor's workers share."""

from __future__ import annotations

import errno
import fcntl
import functools
import gc
import json
import os
import pickle
import shutil
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.training.packing import PackedModule, pack, unpack, unpack_file
from spark_hvd.runner.outcome.next_step import MODULE_ON_SPARK
from spark_hvd.runner.outcome.payload import UnpicklableError
from spark_hvd.runner.spark.private import read_once
from spark_hvd.world.pickles import dumps

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession

    Sent = bytes | Broadcast[bytes]

MODELS_KEPT = 4
"""Number of models that a worker keeps loaded and an executor keeps on disk; the least recently used goes first."""
CHUNK = 64 << 20
"""Bytes of weights per broadcast; a worker that writes them to the file holds one broadcast at a time."""
_STRUCTURE, _WEIGHTS, _LOADING, _ALONE = "structure", "weights.safetensors", "loading", "alone"
_loaded: OrderedDict[tuple[str, str], Any] = OrderedDict()
_spare_modules = functools.cache(gc.freeze)
"""Excludes everything that this worker has imported from garbage collection, before the first model, which may be
dropped later. Spark's daemon collects garbage after each task, and torch's objects cost it 0.1 s."""


@dataclass(frozen=True)
class ModelSource:
    """The source of a worker's model.

    ``key`` identifies the model, in hex digits. The parts are those of a PackedModule, with the weights in pieces; or
    the worker calls ``loader``.
    """

    key: str
    structure: Sent | None = None
    weights: tuple[Sent, ...] = ()
    loader: Callable[[], Any] | None = None


def sent(packed: PackedModule, session: SparkSession, connect: bool) -> ModelSource:
    """Send a packed module to the executors, by broadcasts or, with Spark Connect, which has none, in the plan."""
    pieces = [packed.weights[at : at + CHUNK] for at in range(0, len(packed.weights), CHUNK)]
    if connect:
        return ModelSource(packed.digest(), packed.structure, tuple(pieces))
    broadcast = session.sparkContext.broadcast
    return ModelSource(packed.digest(), broadcast(packed.structure), tuple(map(broadcast, pieces)))


def model_of(source: ModelSource, device: torch.device) -> Any:
    """Return the model, ready for inference on ``device``; cached in this process.

    Raises:
        ModelError: There is no memory for it, or the task's previous worker was killed while it loaded the model.
    """
    key = (source.key, str(device))
    if key not in _loaded:
        while len(_loaded) >= MODELS_KEPT:
            _loaded.popitem(last=False)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # so that a loader's model.cuda() uses it, too
        _spare_modules()
        with memory_named("the model"):
            found = _load(source, device)
            _loaded[key] = found.to(device).eval() if isinstance(found, torch.nn.Module) else found
    _loaded.move_to_end(key)
    return _loaded[key]


@contextmanager
def memory_named(what: str, remedy: str = "") -> Iterator[None]:
    """Return a context that converts out-of-memory errors, which each library words differently, to a ModelError.

    Raises:
        ModelError: ``what`` does not fit; the text names the available memory, and what to change.
    """
    try:
        yield
    except Exception as error:
        text = str(error).lower()
        known = isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", 0) == errno.ENOMEM
        if not known and not any(words in text for words in ("allocate memory", "out of memory", "not enough memory")):
            raise
        message = f"{type(error).__name__}: {error}\n{remedy}"
        host = socket.gethostname()
        if isinstance(error, torch.OutOfMemoryError) or "cuda out of memory" in text:
            raise ModelError(
                f"{what} does not fit into the memory of the GPU on {host}: {message}Give each task its own GPU "
                "(spark.task.resource.gpu.amount=1), run fewer tasks at a time on one, or use a smaller model (half "
                "precision, quantised). nvidia-smi shows what uses it"
            ) from error
        raise ModelError(
            f"{what} does not fit into the memory of this Python worker on {host} ({_memory()}): {message}Give workers "
            "more memory (spark.executor.memoryOverhead, or spark.executor.pyspark.memory where that is set), run "
            "fewer at a time (a higher spark.task.cpus), or use a smaller model (half precision, quantised)"
        ) from error


def _memory() -> str:
    import resource

    import psutil

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    free = f"{psutil.virtual_memory().available >> 20} MiB free"
    return free if limit == resource.RLIM_INFINITY else f"{free}, limit of this process {limit >> 20} MiB"


_NO_SHARING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES),
    *(errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM),  # locks are refused
)
"""Errors of a folder in which workers cannot share models; each worker then loads its own."""


def _load(source: ModelSource, device: torch.device) -> Any:
    folder = _folder()
    if folder is None or (source.loader and device.type == "cuda"):  # models on a GPU share nothing anyway
        return _loaded_alone(source)
    try:
        with _locked(folder):
            place = folder / source.key
            if not (place / _ALONE).exists():
                return _shared(source, place)
    except OSError as error:
        if error.errno not in _NO_SHARING:
            raise
    return _loaded_alone(source)  # without the lock, so that workers load in parallel


def _shared(source: ModelSource, place: Path) -> Any:
    """Map the model from its file, which the first worker writes. The lock must be held."""
    _check_predecessor(place)
    if (place / _STRUCTURE).exists():
        os.utime(place)
        return _unpacked((place / _STRUCTURE).read_bytes(), place / _WEIGHTS)
    _make_room(place.parent)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    (place / _LOADING).write_text(json.dumps(_attempt()))
    try:
        found = None
        if source.loader is not None:
            found = source.loader()
            on_cpu = isinstance(found, torch.nn.Module) and any(
                each.device.type == "cpu" for each in found.parameters()
            )
            if not on_cpu:
                (place / _ALONE).touch()
                return found
            try:
                packed = pack(found)
                _write(place, packed.structure, [packed.weights])
                return _unpacked(packed.structure, place / _WEIGHTS)
            except UnpicklableError:
                (place / _STRUCTURE).unlink(missing_ok=True)
                (place / _ALONE).touch()
                return found
        _write(place, read_once(source.structure), map(read_once, source.weights))
        return _unpacked((place / _STRUCTURE).read_bytes(), place / _WEIGHTS)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    finally:
        (place / _LOADING).unlink(missing_ok=True)


def _write(place: Path, structure: bytes, weights: Any) -> None:
    with open(place / _WEIGHTS, "wb") as file:
        for piece in weights:
            file.write(piece)
    (place / _STRUCTURE).write_bytes(structure)


def _loaded_alone(source: ModelSource) -> Any:
    if source.loader is not None:
        return source.loader()
    weights = b"".join(map(read_once, source.weights))
    with lacking_named("the model"):
        return unpack(PackedModule(read_once(source.structure), weights))


def _unpacked(structure: bytes, weights: Path) -> Any:
    with lacking_named("the model"):
        return unpack_file(structure, str(weights))


def _folder() -> Path | None:
    """Return the folder that this executor's workers share, in Spark's own folder; None elsewhere."""
    folders = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    if not folders or not os.path.isdir(folders):
        return None
    folder = Path(folders, f"spark_hvd-models-{os.getuid()}")
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and not folder.is_symlink():
            return folder
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_room(folder: Path) -> None:
    """Delete old files to make room for another. Processes that have mapped one keep its pages."""
    folders = sorted((each for each in folder.iterdir() if each.is_dir()), key=lambda each: each.stat().st_mtime)
    for each in folders[: max(0, len(folders) - MODELS_KEPT + 1)]:
        shutil.rmtree(each, ignore_errors=True)


def _attempt() -> list[int]:
    """Return stage, partition and attempt of this task."""
    from pyspark import TaskContext

    task = TaskContext.get()
    return [task.stageId(), task.partitionId(), task.attemptNumber()] if task else []


def _check_predecessor(place: Path) -> None:
    """Explain to a task's retry why the previous attempt failed; Spark only knows that its worker is gone.

    Workers are also killed for other reasons, such as a cancelled query, so only a retry reports this.
    """
    now = _attempt()
    try:
        before = json.loads((place / _LOADING).read_text())
    except (OSError, ValueError):
        return
    if now and before[:2] == now[:2] and before[2] < now[2]:
        raise ModelError(
            f"the Python worker that this task had in its attempt {before[2]} was killed on {socket.gethostname()} "
            f"while it loaded the model ({_memory()}): most likely it exceeded its memory. Give workers more "
            "(spark.executor.memoryOverhead), run fewer at a time (a higher spark.task.cpus), or use a smaller model"
        )


class PickledFunction:
    """A function that is unpickled at its first call in a worker; otherwise Spark would fail before our code runs."""

    def __init__(self, name: str, function: Callable[..., Any] | None = None, data: bytes = b"") -> None:
        self.name, self._function, self._data = name, function, data

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function; raise a ModelError if a worker lacks what it needs."""
        if self._function is None:
            with lacking_named(self.name):
                self._function = pickle.loads(self._data)
        return self._function(*args, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return PickledFunction, (self.name, None, self._data or dumps(self._function))


@contextmanager
def lacking_named(what: str) -> Iterator[None]:
    """Return a context that raises a ModelError if a module, or a name in one, is missing while unpickling ``what``.

    Raises:
        ModelError: The text says what is missing, where, and what to do.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"{what} could not be unpickled on {socket.gethostname()} by {sys.executable}: {type(error).__name__}: "
            f"{error}. {MODULE_ON_SPARK}"
        ) from error
