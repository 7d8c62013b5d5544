"""Stores under Horovod's names. Programs may replace their paths, on the object or in a subclass."""

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
        made = Store.create(prefix_path, runs_path=runs_path, storage_options=storage_options)
        vars(self).update(vars(made))
        self.prefix_path = made.url
        self._train_path = train_path or made.join("intermediate_train_data")
        self._val_path = val_path or made.join("intermediate_val_data")
        self._test_path = test_path or made.join("intermediate_test_data")

    __setattr__ = object.__setattr__  # Horovod's stores are not frozen
    __delattr__ = object.__delattr__

    @property
    def plain(self) -> Store:
        return Store.create(self.url, runs_path=self.get_runs_path(), storage_options=self.storage_options)

    @property
    def prepared(self) -> tuple[str | None, str | None]:
        train, val = (
            path if self.exists(path) else None for path in (self.get_train_data_path(), self.get_val_data_path())
        )
        return train, val

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return where prepared training data lie."""
        return _numbered(self._train_path, idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return where prepared validation data lie."""
        return _numbered(self._val_path, idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return where test data lie."""
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
    """Within this context, the columns of a DataFrame lie in the store, for ``fit_on_parquet()``.

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
    parts = [(store.get_train_data_path(), df), (store.get_val_data_path(), None)]
    if isinstance(validation, str):
        chosen = df[validation].cast("float") > 0
        parts = [(parts[0][0], df.where(~chosen)), (parts[1][0], df.where(chosen))]
    elif validation:
        parts = [
            (path, part) for (path, _), part in zip(parts, df.randomSplit([1 - validation, validation]), strict=True)
        ]
    for path, part in parts:
        if part is not None:
            part.select(*names).write.mode("overwrite").parquet(path)
    try:
        yield
    finally:
        for path, part in parts:
            if part is not None:
                store.delete(path)
