"""What estimators report before or after training, tested without one: parameters, checkpoints, saved classes."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators import KerasModel, LightningEstimator, LightningModel, TorchEstimator, TorchModel
from spark_hvd.estimators.fit.trial import spec_for
from spark_hvd.estimators.keras import loop as keras_loop
from spark_hvd.estimators.lightning import epoch
from spark_hvd.estimators.lightning.horovod import HorovodEstimator, HorovodModel, _EachRow
from spark_hvd.estimators.params import persistence
from spark_hvd.estimators.training.history import History
from spark_hvd.store.errors import CheckpointError


def saved(name: str) -> Any:
    line = json.dumps({"class": f"spark_hvd.estimators.{name}", "format_version": persistence.FORMAT_VERSION})
    return SimpleNamespace(read=SimpleNamespace(text=lambda at: SimpleNamespace(head=lambda: [line])))


def test_what_was_saved_by_the_name_of_its_base_is_loaded() -> None:
    """horovod.spark.lightning's names for them were LightningEstimator and LightningModel."""
    assert persistence._metadata(HorovodModel, "m", saved("LightningModel"))
    assert persistence._metadata(HorovodEstimator, "m", saved("LightningEstimator"))
    for kind, other in ((LightningModel, "HorovodModel"), (KerasModel, "TorchModel"), (TorchModel, "KerasModel")):
        with pytest.raises(CheckpointError, match=rf"holds a spark_hvd\.estimators\.{other}, not a {kind.__name__}"):
            persistence._metadata(kind, "m", saved(other))


def test_a_feature_that_transformation_fn_removed_is_told() -> None:
    """Otherwise, parameters by column would apply to other columns."""
    settings = {"feature_cols": ["x", "z"], "label_cols": ["y"], "transformation_removed_fields": ["z"]}
    plan: Any = SimpleNamespace(settings=settings)
    batch = {"x": torch.zeros(2, 1), "y": torch.zeros(2)}
    with pytest.raises(DataError, match=r"feature_cols=.*'z' is not in the batch, .*removed_fields=\['z'\]"):
        spec_for(plan, batch, ())
    assert HorovodEstimator._takes_other_columns
    assert not LightningEstimator._takes_other_columns


def test_precision_beside_a_minibatch_function() -> None:
    """Validation can use bf16; nothing can use the scaled loss of fp16."""
    given = dict.fromkeys(("loss_constructors", "validation", "gradient_clip_norm", "gradient_clip_value"))
    settings = {**given, "loss": ["mse"], "train_minibatch_fn": print}
    TorchEstimator()._check({**settings, "precision": "bf16"})
    with pytest.raises(ValueError, match="precision='fp16' has no effect with train_minibatch_fn"):
        TorchEstimator()._check({**settings, "precision": "fp16"})


def test_a_checkpoint_of_another_optimizer_is_told() -> None:
    keras_loop._check_known(["0/iteration"], {"0/iteration": 1, "1/learning_rate": 0.1}, "r")
    with pytest.raises(CheckpointError, match=r"run_id='r' has no '1/scale' .* Delete the checkpoint, or pass another"):
        keras_loop._check_known(["0/iteration", "1/scale"], {"0/iteration": 1}, "r")


def test_a_function_of_a_dataframe_where_rows_are_given_is_told() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0]})
    with pytest.raises(TypeError, match=r"'dict' object has no attribute 'assign': .* gets a row, a dict"):
        _EachRow(lambda rows: rows.assign(x=2.0))(frame)  # type: ignore[attr-defined] # it is none
    with pytest.raises(AttributeError, match="'float' object has no attribute 'odd'"):
        _EachRow(lambda row: row["x"].odd)(frame)


@pytest.mark.parametrize(("monitor", "told"), [("val_acu", True), ("loss", False), (None, False)])
def test_a_monitor_that_no_epoch_has_is_told(
    monitor: str | None, told: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perhaps no epoch up to the last was validated, and a validated one would have had it."""
    monkeypatch.setattr(epoch.hvd, "rank", lambda: 0)
    spec, history = SimpleNamespace(monitor=monitor), History([{"epoch": 1, "loss": 0.5}])
    job: Any = SimpleNamespace(spec=spec, history=history, awaits_validation=True)
    with caplog.at_level(logging.WARNING):
        epoch.warn_unknown_monitor(job)
    assert ("monitor='val_acu': no epoch has it" in caplog.text) == told
