"""The plan of a fit, made from its parameters before anything is read or started."""

from __future__ import annotations

import random
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from spark_hvd.data.readers.dataset import DatasetMeta
from spark_hvd.estimators.fit.backend import Backend, LocalBackend, SparkBackend, max_num_proc_of, tracker_of
from spark_hvd.estimators.training.elastic import COMMIT_EVERY
from spark_hvd.estimators.training.spec import Objects, TrainSpec
from spark_hvd.runner.config import Reporting
from spark_hvd.runner.spark.session import active_session, is_local
from spark_hvd.scratch import Scratch
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError

Settings = Mapping[str, Any]

_temporary: list[Scratch] = []
_fits: dict[str, tuple[int, dict[str, Any]]] = {}
"""By estimator: how many fits there were, and the plain parameters of the last; fits run in several threads."""
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """A fit of the estimator ``name``; later stages add data, inputs and labels to ``spec``."""

    name: str
    settings: Settings
    backend: Backend
    store: Store
    objects: Objects
    spec: TrainSpec


def label_of(uid: str, settings: Settings) -> str:
    """Return a fit's label among those of the same estimator and its copies: its number and the changed parameters.

    CrossValidator makes such fits for each fold and each point of a grid. The first fit's label is empty.
    """
    plain = {name: value for name, value in settings.items() if isinstance(value, str | int | float)}
    with _lock:
        fits, before = _fits.get(uid, (0, plain))
        _fits[uid] = fits + 1, plain
    changed = [f"{name}={value!r}" for name, value in plain.items() if before.get(name) != value]
    return ", ".join([f"fit {fits + 1}", *changed]) if fits else ""


def make_plan(name: str, settings: Settings, label: str = "") -> FitPlan:
    """Make the plan from checked parameters. Fields of TrainSpec and Objects get the parameters of their names.

    Raises:
        ValueError: A run to resume has no store, and executors may be on several hosts.
        StoreError: Ranks would not see the store.
    """
    weight = [settings["sample_weight_col"]] if settings["sample_weight_col"] else []
    backend: Backend = settings["backend"] or SparkBackend(
        settings["num_proc"],
        max_num_proc=settings["max_num_proc"],
        verbose=min(settings["verbose"], 1),
        min_num_proc=settings["min_num_proc"],
        reporting=Reporting(progress=settings["progress"], tracker=settings["tracker"]),
        seed=settings["random_seed"],
        env=settings["env"],
        **({} if settings["max_num_proc"] else {"max_restarts": settings["max_restarts"]}),
    )
    elastic = max_num_proc_of(backend) is not None
    seed = settings["random_seed"]
    alone = settings["store"] is None and not isinstance(backend, LocalBackend) and not is_local(active_session(None))
    if alone and settings["run_id"] is not None:
        raise ValueError(store_missing(f"run_id={settings['run_id']!r} resumes from checkpoints"))
    if alone and elastic:
        raise ValueError(store_missing("ranks that come and go (max_num_proc) read their rows from files"))
    keeps = bool(getattr(tracker_of(backend), "checkpoints", False))
    if keeps and settings.get("collate"):
        raise ValueError(
            f"MlflowTracker(checkpoints=True) with {name}: its models take raw columns, but models in MLflow cannot. "
            "Omit checkpoints"
        )
    if keeps and alone:
        raise ValueError(store_missing("MlflowTracker(checkpoints=True) reads the checkpoint of each epoch"))
    if runs := settings.get("validation_in_background", 0):
        backend = _leaving_slots(backend, settings, runs)
        if alone:
            raise ValueError(store_missing(f"validation_in_background={runs} reads rows and checkpoints from files"))
    store = _store(settings["store"], alone)
    spec: dict[str, Any] = {
        **_fields_of(TrainSpec, settings),
        "label": label,
        "inputs": (),
        "labels": (),
        "columns": tuple(dict.fromkeys([*settings["feature_cols"], *settings["label_cols"], *weight])),
        "train": DatasetMeta("", (), ()),
        "validation": None,
        "store": store,
        "run_id": settings["run_id"] or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}",
        "val_batch_size": settings["val_batch_size"] or settings["batch_size"],
        "fit_id": None if alone else uuid.uuid4().hex,
        "returns_state": alone,
        "elastic": elastic,
        "keeps_epochs": keeps,
        "commit_every": _commit_every(settings, elastic),
        "seed": random.SystemRandom().randrange(2**31) if seed is None else seed,
        "draws_seed": seed is None,
        "reshape_labels": settings["label_shapes"] is None,
        "reader": {
            "kind": settings["reader"],
            "window_rows": settings["shuffle_buffer_size"],
            "cache": settings["inmemory_cache_all"],
            "workers": settings["train_reader_num_workers"],
            "pool": settings["reader_pool_type"],
            "edit_fields": tuple(settings["transformation_edit_fields"] or ()),
            "removed_fields": tuple(settings["transformation_removed_fields"] or ()),
            "text": settings.get("text", ()),
        },
    }
    functions = {name: settings.get(name) for name in ("decoders", "transformation_fn", "collate")}
    objects = {**_fields_of(Objects, settings), "reader": functions}
    return FitPlan(
        name=f"{name} ({label})" if label else name,
        settings=settings,
        backend=backend,
        store=store,
        objects=Objects(**objects),
        spec=TrainSpec(**spec),
    )


def _leaving_slots(backend: Backend, settings: Settings, runs: int) -> Backend:
    """Return a backend that leaves some slots of the cluster free, if it would otherwise take all."""
    if not hasattr(backend, "run_in_background"):
        raise ValueError(
            f"validation_in_background={runs} with backend={backend!r}: expected one that can run two things at "
            "once, a SparkBackend or LocalBackend"
        )
    if settings["backend"] is not None or settings["num_proc"] is not None or settings["max_num_proc"] is not None:
        return backend
    assert isinstance(backend, SparkBackend)
    return backend.of(max(1, backend.num_processes() - runs))


def _commit_every(settings: Settings, elastic: bool) -> int | None:
    every: int | None = settings.get("commit_every")  # classifiers have none
    if every is not None and not elastic:
        raise ValueError(
            f"commit_every={every} without max_num_proc: it says how often an elastic fit commits. Pass max_num_proc "
            "too, or checkpoint_every for checkpoints in the store"
        )
    if every is not None or not elastic or "trainer_args" in settings:  # Lightning's commits make files in memory
        return every
    return COMMIT_EVERY * int(settings["backward_passes_per_step"])


def _passes(settings: Settings) -> tuple[str, int]:
    """Return the parameter with the number of batches per optimizer step, and its value."""
    if "trainer_args" in settings:
        found = settings["trainer_args"].get("accumulate_grad_batches", 1)
        return "trainer_args' accumulate_grad_batches", found if isinstance(found, int) and found > 0 else 1
    return "backward_passes_per_step", settings["backward_passes_per_step"]


def store_missing(reason: str) -> str:
    """Return the text of the error that executors on several hosts have no storage that all of them can reach."""
    return (
        f"store is missing: {reason}, and executors on several hosts need storage that all of them can reach, such as "
        "store=Store.create('s3://bucket/folder') or a shared file system"
    )


def _fields_of(kind: type[Any], settings: Settings) -> dict[str, Any]:
    return {each.name: settings[each.name] for each in fields(kind) if settings.get(each.name) is not None}


def check_together(name: str, settings: Settings, required: Mapping[str, str]) -> None:
    """Check that all ``required`` parameters (name -> meaning) are given, and that parameters are consistent.

    Raises:
        ValueError: They are not; the text names them.
    """
    for parameter, meaning in required.items():
        if settings[parameter] is None:
            raise ValueError(f"{parameter} is missing: {name} needs {meaning}")
    for shapes, columns in (("input_shapes", "feature_cols"), ("label_shapes", "label_cols")):
        for parameter in (shapes, shapes.replace("shapes", "dtypes")):
            if settings[parameter] is not None and len(settings[parameter]) != len(settings[columns]):
                raise ValueError(
                    f"{parameter} has {len(settings[parameter])} entries for {len(settings[columns])} {columns}: "
                    "expected one for each; None keeps the default"
                )
    name_of_passes, passes = _passes(settings)
    for parameter in ("checkpoint_every", "commit_every"):
        if (every := settings.get(parameter)) is not None and every % passes:
            raise ValueError(
                f"{parameter}={every} with {name_of_passes}={passes}: expected a multiple of it, because a "
                "checkpoint contains no gradients"
            )
    if settings["backend"] is None:
        _check_numbers(settings)
        return
    if settings["num_proc"] is not None:
        raise ValueError(
            f"num_proc={settings['num_proc']} and backend are both given: pass the number to the backend, "
            "SparkBackend(num_proc=...)"
        )
    if settings["max_num_proc"] is not None:
        raise ValueError(
            f"max_num_proc={settings['max_num_proc']} and backend are both given: pass it to the backend, "
            "SparkBackend(max_num_proc=...)"
        )
    if settings["max_restarts"] or settings["min_num_proc"] is not None:
        raise ValueError(
            f"max_restarts={settings['max_restarts']}, min_num_proc={settings['min_num_proc']} and backend are "
            "given: pass them to the backend, SparkBackend(max_restarts=...)"
        )
    if settings["tracker"] is not None:
        raise ValueError("tracker and backend are both given: pass it to the backend, SparkBackend(tracker=...)")


def _check_numbers(settings: Settings) -> None:
    most, least, number = (settings[name] for name in ("max_num_proc", "min_num_proc", "num_proc"))
    if most is None:
        return
    if settings["max_restarts"]:
        raise ValueError(
            f"max_restarts={settings['max_restarts']} with max_num_proc={most}: an elastic fit continues with the "
            "remaining ranks and lets others join, instead of restarting from a checkpoint. Pass only one of the two"
        )
    if not (least or 1) <= (number or least or 1) <= most:
        raise ValueError(
            f"min_num_proc={least}, num_proc={number}, max_num_proc={most}: expected 1 <= min_num_proc <= num_proc "
            "<= max_num_proc"
        )


def _store(store: Store | None, alone: bool) -> Store:
    if alone:  # nothing is written to it, as ranks have their own
        return Store.create(tempfile.gettempdir())
    if store is None:
        if not _temporary:  # one folder for all fits of this process without a store; it goes with the process
            _temporary.append(Scratch("fits"))
        store = Store.create(_temporary[0].path)
    if not store.is_shared:
        raise StoreError(f"store={store.url}: ranks are other processes and cannot see it. Use a shared path")
    return store.plain
