"""What all estimators share: from a DataFrame and parameters to a trained Spark ML model."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from spark_hvd.estimators.data.columns import check_columns, columns_of, expression_of
from spark_hvd.estimators.data.leases import in_use
from spark_hvd.estimators.data.materialize import materialize
from spark_hvd.estimators.data.parquet import dataset_of
from spark_hvd.estimators.errors import DataError, EstimatorError
from spark_hvd.estimators.fit.backend import Backend, LocalBackend, SparkBackend
from spark_hvd.estimators.fit.trial import ROWS, batch_of, first_batch, label_dtype, try_batch
from spark_hvd.estimators.params.params import TableParams
from spark_hvd.estimators.params.persistence import ParamsReader, ParamsWriter
from spark_hvd.estimators.params.tables import MODEL_SETTINGS
from spark_hvd.estimators.readers.dataset import Column, DatasetMeta
from spark_hvd.estimators.readers.reader import Batch, ReaderSpec
from spark_hvd.estimators.training.checkpoint import BEST, LAST, Checkpoints, check_fits
from spark_hvd.estimators.training.head import head_of
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.inputs import TensorSpec
from spark_hvd.estimators.training.packing import pack
from spark_hvd.estimators.training.spec import Objects, TrainSpec
from spark_hvd.estimators.training.train import Framework, check_order, train
from spark_hvd.estimators.transform.meta import ModelMeta
from spark_hvd.runner.outcome.errors import ExecutorLostError, RankFailedError
from spark_hvd.runner.outcome.payload import renamed
from spark_hvd.runner.spark.names import job_group, job_named
from spark_hvd.runner.spark.session import active_session, is_local
from spark_hvd.scratch import Scratch
from spark_hvd.store import Store
from spark_hvd.store.errors import StoreError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from spark_hvd.estimators.torch.model import TorchModel

Settings = Mapping[str, Any]


class SparkEstimator(TableParams, Estimator, MLWritable, MLReadable):  # type: ignore[type-arg] # pyspark's bases
    """Base of the estimators. A subclass gives its table of parameters, its framework, and the model that comes out.

    A saved estimator holds a pickle of model, loss and optimizer: only load what you trust. Its backend and
    its tracker are not saved.
    """

    _required: ClassVar[Mapping[str, str]] = {
        "model": "the model to train",
        "feature_cols": "the columns that the model gets",
        "label_cols": "the columns that outputs are compared with",
    }

    def fit_on_parquet(
        self, train_path: str | None = None, val_path: str | None = None, params: Mapping[Any, Any] | None = None
    ) -> TorchModel:
        """Train on Parquet that exists already: a file or a directory of files, also one that Petastorm wrote.

        Args:
            train_path: Of the training data; by default the store's ``train_path``.
            val_path: Of validation data; by default the store's ``val_path``, and none if that is None too.
            params: Parameters for this fit only, as in ``fit``.

        Returns:
            The trained model.

        Raises:
            ValueError, TypeError: a parameter is wrong.
            DataError: there are no such data, or they do not fit the parameters.
            ModelError: the model does not work on them.
            RunError: ranks failed.
        """
        if params:
            return self.copy(dict(params)).fit_on_parquet(train_path, val_path)
        settings = self._settings()
        if settings["validation"] is not None:
            raise ValueError(
                f"validation={settings['validation']!r}: fit_on_parquet takes validation data from val_path; "
                "leave validation out"
            )
        store = self._store(settings)
        train_path, val_path = train_path or store.train_path, val_path or store.val_path
        if train_path is None:
            raise ValueError("train_path is missing: give it, or Store.create(..., train_path=...)")
        names = self._column_names(settings)
        # A store reads below its own file system only; the data may lie elsewhere.
        data = Store.create(train_path, storage_options=store.storage_options)
        edited = {field[0] for field in settings["transformation_edit_fields"] or ()}
        wanted = None if settings["transformation_fn"] else [name for name in names if name not in edited]
        train_data = dataset_of(data, train_path, wanted)
        val_data = dataset_of(data, val_path, wanted) if val_path else None
        kind = settings["reader"]
        fields = {**self._reader_fields(settings), **self._reader_functions(settings)}
        del fields["kind"]
        reader = ReaderSpec(dataset=train_data, columns=tuple(names), store=data, batch_size=ROWS, **fields)
        batch = first_batch(reader, kind)
        self._try(*self._spec(settings, store, batch, train_data, None), batch)
        return self._train(settings, store, batch, train_data, val_data)

    def write(self) -> MLWriter:
        """See pyspark.ml.util.MLWritable."""
        return ParamsWriter(self, skip=("backend", "tracker"))

    @classmethod
    def read(cls) -> MLReader[Any]:
        """See pyspark.ml.util.MLReadable."""
        return ParamsReader(cls)

    def _fit(self, dataset: DataFrame) -> TorchModel:
        with job_group(dataset.sparkSession, self.uid):
            return self._fit_on(dataset)

    def _fit_on(self, dataset: DataFrame) -> TorchModel:
        settings = self._settings()
        store = self._store(settings)
        names = self._column_names(settings)
        for parameter in ("feature_cols", "label_cols"):
            check_columns(dataset.schema, settings[parameter], parameter)
        if settings["sample_weight_col"]:
            check_columns(dataset.schema, [settings["sample_weight_col"]], "sample_weight_col")
        columns = columns_of(
            dataset.schema,
            names,
            decoders=set(settings["decoders"]),
            compress_sparse=settings["compress_sparse_cols"],
        )
        table = _some_rows(dataset, columns, type(self).__name__)
        fields = {**self._reader_fields(settings), **self._reader_functions(settings)}
        del fields["kind"]
        batch = batch_of(table, columns, names, fields)
        self._try(*self._spec(settings, store, batch, DatasetMeta("the DataFrame", columns, ()), None), batch)
        num_proc = self._backend(settings).num_processes()
        train_data, val_data = materialize(
            dataset,
            columns,
            store,
            num_proc=num_proc,
            validation=settings["validation"] or None,
            seed=settings["random_seed"] or 0,
            partitions_per_process=settings["partitions_per_process"],
            who=type(self).__name__,
        )
        with in_use(store, train_data):
            return self._train(settings, store, batch, train_data, val_data)

    def _train(
        self, settings: Settings, store: Store, batch: Batch, train_data: DatasetMeta, val_data: DatasetMeta | None
    ) -> TorchModel:
        backend = self._backend(settings)
        size = backend.num_processes()
        for what, data in (("training", train_data), ("validation", val_data)):
            if data is not None and data.rows < size:
                raise DataError(
                    f"{data.rows} rows for {what} and num_proc={size}: expected at least one row for each rank. "
                    "Use fewer ranks or more rows"
                )
        spec, objects = self._spec(settings, store, batch, train_data, val_data)
        store.check_writable()
        checkpoints = Checkpoints(store, spec.run_id)
        history = History()
        if spec.resume:
            state = checkpoints.load()
            check_fits(state, objects.model, spec.run_id)
            if settings["random_seed"] is None:  # else the order of rows would be another
                spec = replace(spec, seed=state["seed"])
            check_order(state, spec)
            history = History(state["history"])
        if len(history) < spec.epochs:
            try:
                values = backend.run(
                    renamed(train, type(self).__name__), (spec, pack(objects, "the parameters"), self._framework())
                )
            except RankFailedError as error:
                if isinstance(error.__cause__, EstimatorError | StoreError):
                    raise type(error.__cause__)(str(error.__cause__)) from error
                raise
            except ExecutorLostError as error:
                raise ExecutorLostError(
                    f"{error} The last checkpoint, if there was one, is kept: fit again with "
                    f"run_id={spec.run_id!r} to go on from it."
                ) from error
            assert values[0] is not None
            history = values[0]
        best = settings["restore_best_weights"] and checkpoints.exists(BEST)
        return self._model(settings, spec, objects, checkpoints.load(BEST if best else LAST), history)

    # -- from parameters to what is trained

    def _settings(self) -> Settings:
        settings = {row.name: self.value_of(row.name) for row in self._table}
        for name, meaning in self._required.items():
            if settings[name] is None:
                raise ValueError(f"{name} is missing: {type(self).__name__} needs {meaning}")
        for name, columns in (("input_shapes", "feature_cols"), ("label_shapes", "label_cols")):
            for parameter in (name, name.replace("shapes", "dtypes")):
                if settings[parameter] is not None and len(settings[parameter]) != len(settings[columns]):
                    raise ValueError(
                        f"{parameter} has {len(settings[parameter])} entries for {len(settings[columns])} {columns}: "
                        "expected one for each; None leaves one as it is"
                    )
        if settings["backend"] is not None and settings["num_proc"] is not None:
            raise ValueError(
                f"num_proc={settings['num_proc']} and backend are both given: give the number to the backend, "
                "SparkBackend(num_proc=...)"
            )
        if settings["backend"] is not None and (settings["max_restarts"] or settings["min_num_proc"] is not None):
            raise ValueError(
                f"max_restarts={settings['max_restarts']}, min_num_proc={settings['min_num_proc']} and backend are "
                "given: give them to the backend, SparkBackend(max_restarts=...)"
            )
        if settings["backend"] is not None and settings["tracker"] is not None:
            raise ValueError("tracker and backend are given: give it to the backend, SparkBackend(tracker=...)")
        self._check(settings)
        return settings

    def _check(self, settings: Settings) -> None:
        """Raise a ValueError for parameters that do not go together."""

    def _column_names(self, settings: Settings) -> list[str]:
        weight = [settings["sample_weight_col"]] if settings["sample_weight_col"] else []
        return list(dict.fromkeys([*settings["feature_cols"], *settings["label_cols"], *weight]))

    def _backend(self, settings: Settings) -> Backend:
        backend: Backend = settings["backend"] or SparkBackend(
            settings["num_proc"],
            verbose=min(settings["verbose"], 1),
            progress=settings["progress"],
            max_restarts=settings["max_restarts"],
            min_num_proc=settings["min_num_proc"],
            tracker=settings["tracker"],
        )
        return backend

    def _store(self, settings: Settings) -> Store:
        if settings["store"] is not None:
            store: Store = settings["store"]
        elif isinstance(settings["backend"], LocalBackend) or is_local(active_session(None)):
            store = _temporary_store()
        else:
            raise ValueError(
                "store is missing: executors on several hosts need a place that all of them reach, such as "
                "store=Store.create('s3://bucket/folder') or a shared file system"
            )
        if not store.is_shared:
            raise StoreError(f"store={store.url}: ranks are other processes and see nothing of it. Use a shared path")
        return store

    def _reader_fields(self, settings: Settings) -> dict[str, Any]:
        return {
            "kind": settings["reader"],
            "window_rows": settings["shuffle_buffer_size"],
            "drop_last": settings["drop_last"],
            "cache": settings["inmemory_cache_all"],
            "workers": settings["train_reader_num_workers"],
            "pool": settings["reader_pool_type"],
            "edit_fields": tuple(settings["transformation_edit_fields"] or ()),
            "removed_fields": tuple(settings["transformation_removed_fields"] or ()),
        }

    def _reader_functions(self, settings: Settings) -> dict[str, Any]:
        return {"decoders": settings["decoders"], "transformation_fn": settings["transformation_fn"]}

    def _spec(
        self,
        settings: Settings,
        store: Store,
        batch: Batch,
        train_data: DatasetMeta,
        val_data: DatasetMeta | None,
    ) -> tuple[TrainSpec, Objects]:
        run_id = settings["run_id"] or f"{type(self).__name__}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        objects = self._objects(settings)
        inputs = self._tensors(settings, "feature_cols", "input", batch, train_data)
        labels = self._tensors(settings, "label_cols", "label", batch, train_data)
        if settings["label_dtypes"] is None:
            labels = tuple(
                TensorSpec(label.column, label_dtype(batch[label.column.name], objects.losses, i), label.shape)
                for i, label in enumerate(labels)
            )
        seed = settings["random_seed"]
        common: dict[str, Any] = {
            "inputs": inputs,
            "labels": labels,
            "weight": settings["sample_weight_col"],
            "train": train_data,
            "validation": val_data,
            "store": store,
            "run_id": run_id,
            "batch_size": settings["batch_size"],
            "val_batch_size": settings["val_batch_size"] or settings["batch_size"],
            "epochs": settings["epochs"],
            "steps": settings["train_steps_per_epoch"],
            "val_steps": settings["validation_steps_per_epoch"],
            "seed": random.SystemRandom().randrange(2**31) if seed is None else seed,
            "shuffle": settings["shuffle"],
            "monitor": settings["monitor"],
            "monitor_mode": settings["monitor_mode"],
            "reshape_labels": settings["label_shapes"] is None,
            "use_gpu": settings["use_gpu"],
            "verbose": settings["verbose"],
            "reader": self._reader_fields(settings),
            "val_workers": settings["val_reader_num_workers"],
            "resume": settings["run_id"] is not None and Checkpoints(store, run_id).exists(),
        }
        return TrainSpec(**{**common, **self._spec_fields(settings)}), objects

    def _tensors(
        self, settings: Settings, columns: str, what: str, batch: Batch, data: DatasetMeta
    ) -> tuple[TensorSpec, ...]:
        names = settings[columns]
        shapes = settings[f"{what}_shapes"] or [None] * len(names)
        dtypes = settings[f"{what}_dtypes"] or [None] * len(names)
        known = {column.name: column for column in data.columns}
        return tuple(
            # What a decoder or transformation_fn makes of a column is known from the batch.
            TensorSpec(_as_in(batch[name], known.get(name) or Column(name, "object")), dtype, shape)
            for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
        )

    # -- what a subclass adds

    def _try(self, spec: TrainSpec, objects: Objects, batch: Batch) -> None:
        try_batch(spec, objects, batch)

    def _framework(self) -> Framework:
        raise NotImplementedError

    def _objects(self, settings: Settings) -> Objects:
        raise NotImplementedError

    def _spec_fields(self, settings: Settings) -> dict[str, Any]:
        return {}

    def _model(
        self, settings: Settings, spec: TrainSpec, objects: Objects, state: Mapping[str, Any], history: History
    ) -> TorchModel:
        raise NotImplementedError


def model_fields(
    settings: Settings, spec: TrainSpec, objects: Objects, model: torch.nn.Module, history: History
) -> dict[str, Any]:
    """What every estimator gives to the model that comes out of it, as keywords.

    Args:
        settings: The estimator's.
        spec: The training.
        objects: What it was trained with.
        model: With the trained weights.
        history: Of the training.
    """
    labels = tuple(label.column for label in spec.labels)
    return {
        "model": model.eval(),
        "metadata": ModelMeta(spec.inputs, labels, head_of(objects.losses)),
        "history": history,
        "run_id": spec.run_id,
        "feature_columns": settings["feature_cols"],
        "label_columns": settings["label_cols"],
        **{name: settings[name] for name in MODEL_SETTINGS},
    }


def _some_rows(df: DataFrame, columns: tuple[Column, ...], who: str) -> pa.Table:
    import pyarrow as pa

    few = df.select([expression_of(column) for column in columns]).limit(ROWS)
    with job_named(few, f"spark_hvd: {who} looks at {ROWS} rows"):
        if hasattr(few, "toArrow"):  # Spark 4
            return few.toArrow()
        return pa.Table.from_pandas(few.toPandas(), preserve_index=False)


def _as_in(tensor: torch.Tensor, column: Column) -> Column:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Column(column.name, dtype, tuple(tensor.shape[1:]), column.spark_type, column.encoding)


_temporary: list[Scratch] = []


def _temporary_store() -> Store:
    """One folder for all fits of this process that name no store; it goes with the process."""
    if not _temporary:
        _temporary.append(Scratch("fits"))
    return Store.create(_temporary[0].path)
