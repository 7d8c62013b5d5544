"""Stores by Horovod's names. Their paths may be replaced, on the object or in a subclass, as its programs do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spark_hvd.store import Store


class FilesystemStore(Store):
    """A store whose methods tell its paths, which a subclass or an assignment may replace.

    Args:
        prefix_path: As of :meth:`Store.create`, as are ``storage_options`` and, for the data and runs, the other paths.
        train_path: Of data to train on; by default ``<prefix_path>/intermediate_train_data``.
        val_path: Of data to validate on; by default ``<prefix_path>/intermediate_val_data``.
        test_path: Of data to test on; only told.
        runs_path: Of the runs.
        others: Options of Horovod's stores that mean nothing here.
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
        """Where prepared data to train on lie."""
        return _numbered(self._train_path, idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Where prepared data to validate on lie."""
        return _numbered(self._val_path, idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Where data to test on lie."""
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
    """Within this context, the columns of a DataFrame lie in the store for ``fit_on_parquet()``.

    Args:
        num_processes: Number of ranks; they share any files here.
        store: Where to.
        df: A DataFrame of Spark.
        label_columns: Their names.
        feature_columns: Their names.
        validation: The share of the rows, or a column that is above 0, of those to validate on.
        sample_weight_col: Name of the column of weights.
        others: Options of Horovod's writer that mean nothing here.
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
