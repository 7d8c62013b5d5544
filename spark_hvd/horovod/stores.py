"""Stores under Horovod's names, whose paths a program may replace, on the object or in a subclass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spark_hvd.store import Store


class FilesystemStore(Store):
    """A store whose paths come from methods, which a subclass or an assignment may replace.

    Args:
        prefix_path: See :meth:`Store.create`, also for ``storage_options``.
        train_path: Training data; by default ``<prefix_path>/intermediate_train_data``.
        val_path: Validation data; by default ``<prefix_path>/intermediate_val_data``.
        test_path: Test data; only returned by :meth:`get_test_data_path`.
        runs_path: Directory of the runs.
        others: Options of Horovod's stores that have no effect here.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        storage_options: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        vars(self).update(vars(Store.create(prefix_path, runs_path=runs_path, storage_options=storage_options)))
        self.prefix_path = self.url
        self._train_path = train_path or self.join("intermediate_train_data")
        self._val_path = val_path or self.join("intermediate_val_data")
        self._test_path = test_path or self.join("intermediate_test_data")

    __setattr__ = object.__setattr__  # Horovod's stores are not frozen
    __delattr__ = object.__delattr__

    @property
    def plain(self) -> Store:
        return Store.create(self.url, runs_path=self.get_runs_path(), storage_options=self.storage_options)

    @property
    def prepared(self) -> tuple[str | None, str | None]:
        train, val = self.get_train_data_path(), self.get_val_data_path()
        return train if self.exists(train) else None, val if self.exists(val) else None

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the path of the prepared training data."""
        return _numbered(self._train_path, idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the path of the prepared validation data."""
        return _numbered(self._val_path, idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return the path of the test data."""
        return _numbered(self._test_path, idx)

    def get_runs_path(self) -> str:
        """Return the directory that holds all runs."""
        return self.runs_path or self.join("runs")

    def get_run_path(self, run_id: str) -> str:
        """Return the directory of a run."""
        return self.plain.run_path(run_id)

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the path of a run's checkpoint file."""
        return self.plain.checkpoint_path(run_id)

    def get_logs_path(self, run_id: str) -> str:
        """Return the directory of a run's logs."""
        return self.plain.logs_path(run_id)

    def read(self, path: str) -> bytes:
        """Return the content of a file, as bytes."""
        return self.read_bytes(path)

    def write_text(self, path: str, text: str) -> None:
        """Write text to a file, in UTF-8."""
        self.write_bytes(path, text.encode())


class HDFSStore(FilesystemStore):
    """A store on HDFS, also if the path does not say so.

    Args:
        prefix_path: ``hdfs://host:port/path``, ``hdfs:///path`` or ``/path``.
        host: The name node; by default that of Hadoop's configuration.
        port: Its port.
        user, kerb_ticket, extra_conf: Not supported.
        driver: Has no effect: the installed package decides.
        args, others: As for :class:`FilesystemStore`.

    Raises:
        ValueError: An argument that is not supported is given, or ``host`` and ``prefix_path`` differ.
    """

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: dict[str, str] | None = None,
        *args: Any,
        **others: Any,
    ) -> None:
        for name, value, instead in (
            ("user", user, "set HADOOP_USER_NAME for driver and executors"),
            ("kerb_ticket", kerb_ticket, "set KRB5CCNAME for driver and executors"),
            ("extra_conf", extra_conf, "set HADOOP_CONF_DIR to a directory with these settings"),
        ):
            if value:
                raise ValueError(f"HDFSStore({name}={value!r}) is not supported. Next: {instead}, and omit {name}")
        path = prefix_path.removeprefix("hdfs://")
        node, slash, rest = path.partition("/")
        if not slash or (node and path == prefix_path):
            raise ValueError(f"prefix_path={prefix_path!r}: expected hdfs://host:port/path, hdfs:///path or /path")
        if port and not host:
            raise ValueError(f"HDFSStore(port={port}) needs host=, too")
        wanted = f"{host}:{port}" if port else host or ""
        if node and wanted not in ("", node):
            raise ValueError(f"prefix_path={prefix_path!r} names another name node than host and port, {wanted!r}")
        super().__init__(f"hdfs://{node or wanted}/{rest}", *args, **others)


def _numbered(path: str, idx: int | None) -> str:
    return path if idx is None else f"{path}.{idx}"


@contextmanager
def prepare_data(
    num_processes: int,
    store: FilesystemStore,
    df: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    **others: Any,
) -> Iterator[None]:
    """Write columns of a DataFrame to the store, for ``fit_on_parquet()``, and delete them when the context ends.

    Args:
        num_processes: Number of ranks; they can share any files here.
        store: The store to write to.
        df: A DataFrame of Spark.
        label_columns: Names of the label columns.
        feature_columns: Names of the feature columns.
        validation: The share of rows for validation, or a column that is above 0 in such rows.
        sample_weight_col: Name of the column of weights.
        others: Options of Horovod's writer that have no effect here.
    """
    names = dict.fromkeys([*feature_columns, *label_columns, *filter(None, [sample_weight_col])])
    parts = [df]
    if isinstance(validation, str):
        chosen = df[validation].cast("float") > 0
        parts = [df.where(~chosen), df.where(chosen)]
    elif validation:
        parts = df.randomSplit([1 - validation, validation])
    by_path = dict(zip((store.get_train_data_path(), store.get_val_data_path()), parts, strict=False))
    for path, part in by_path.items():
        part.select(*names).write.mode("overwrite").parquet(path)
    try:
        yield
    finally:
        for path in by_path:
            store.delete(path)
