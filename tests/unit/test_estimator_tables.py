"""The parameters of estimators: one table, from which everything else follows, including the documentation."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from spark_hvd.estimators import LightningEstimator, TextClassifier, TorchEstimator
from spark_hvd.estimators.keras.tables import GONE as KERAS_GONE
from spark_hvd.estimators.keras.tables import KERAS
from spark_hvd.estimators.params.tables import GONE, TORCH

ROOT = Path(__file__).resolve().parents[2]

# The shared and the torch Params of Horovod 0.28, without those of its data modules and of NVTabular.
HOROVOD = [
    "num_proc",
    "model",
    "backend",
    "store",
    "optimizer",
    "loss",
    "loss_weights",
    "sample_weight_col",
    "metrics",
    "feature_cols",
    "label_cols",
    "validation",
    "gradient_compression",
    "compress_sparse_cols",
    "batch_size",
    "val_batch_size",
    "epochs",
    "verbose",
    "callbacks",
    "random_seed",
    "shuffle_buffer_size",
    "shuffle",
    "partitions_per_process",
    "run_id",
    "train_steps_per_epoch",
    "validation_steps_per_epoch",
    "transformation_fn",
    "transformation_edit_fields",
    "transformation_removed_fields",
    "train_reader_num_workers",
    "val_reader_num_workers",
    "reader_pool_type",
    "label_shapes",
    "inmemory_cache_all",
    "use_gpu",
    "backward_passes_per_step",
    "input_shapes",
    "loss_constructors",
    "train_minibatch_fn",
]


KERAS_OF_HOROVOD = {"custom_objects", "checkpoint_callback", "backend_env"}


def test_horovods_parameters_for_keras_are_all_there() -> None:
    names = {row.name for row in KERAS}
    assert (KERAS_OF_HOROVOD | set(HOROVOD)) - names <= KERAS_GONE.keys()
    assert not names & KERAS_GONE.keys()


def test_horovods_parameters_are_all_there() -> None:
    names = {row.name for row in TORCH}
    assert set(HOROVOD) <= names
    assert not set(GONE) & names


@pytest.mark.parametrize("name", ["estimators.md", "transformers.md"])
def test_a_page_shows_its_table(name: str) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "parameters.py"))
    page = (ROOT / "docs" / name).read_text()
    assert page == made["in_page"](page, made["PAGES"][name]), "write it anew: python docs/parameters.py"


@pytest.mark.parametrize("kind", [TorchEstimator, LightningEstimator, TextClassifier])
def test_every_parameter_has_getter_setter_and_default(kind: Any) -> None:
    made = kind()
    for row in kind._table:
        camel = "".join(word.capitalize() for word in row.name.split("_"))
        assert getattr(made, f"get{camel}")() == row.default
        assert getattr(made, f"set{camel}")(row.default) is made
        assert made.getParam(row.name).doc == row.doc
        assert row.doc.endswith(".")


def test_horovods_names_of_getters() -> None:
    for name in ("getNumProc", "setFeatureCols", "getSampleWeightCol", "setInputShapes", "getTrainMinibatchFn"):
        assert callable(getattr(TorchEstimator, name))


def test_defaults_are_ones_own_and_none_gives_them_back() -> None:
    one, other = TorchEstimator(), TorchEstimator()
    one.getCallbacks().append("mine")
    assert other.getCallbacks() == TorchEstimator().getCallbacks() == []
    one.setBatchSize(64).setParams(batch_size=None)
    assert one.getBatchSize() == 32
    assert not one.isSet(one.batch_size)
    assert one.copy({one.batch_size: None}).value_of("batch_size") == 32
