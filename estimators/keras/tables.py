"""The parameters of KerasEstimator and KerasModel: those that all estimators share, and those of Keras."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spark_hvd.estimators.keras.module import KerasModule
from spark_hvd.estimators.params import checks as c
from spark_hvd.estimators.params.params import rows
from spark_hvd.estimators.params.tables import BACKGROUND, CHECKPOINT_EVERY, COMMIT_EVERY, SHARED
from spark_hvd.estimators.params.tables import GONE as GONE_EVERYWHERE
from spark_hvd.estimators.torch.model import TABLE


def keras_model(name: str, value: Any) -> KerasModule:
    """Check for a Keras model that has its variables."""
    if isinstance(value, KerasModule):
        return value
    if isinstance(value, type) or not all(hasattr(value, each) for each in ("train_on_batch", "weights", "built")):
        raise TypeError(f"{name}={value!r}: expected a keras.Model (an object, not a class)")
    if not value.built or not value.weights:
        raise ValueError(
            f"{name}={value.name!r} has no variables yet: give it an Input, or call it on a batch, before fit. A "
            "class of your own needs get_config(), and build() if it creates layers there"
        )
    return KerasModule(value)


def optimizer(name: str, value: Any) -> Any:
    """Check for an optimizer of Keras, or its name."""
    if not isinstance(value, str) and (isinstance(value, type) or not hasattr(value, "apply_gradients")):
        raise TypeError(f"{name}={value!r}: expected an optimizer of Keras, such as keras.optimizers.Adam(), or a name")
    return value


def objects(name: str, value: Any) -> dict[str, Any]:
    """Check for a dict of names."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name}={value!r}: expected a dict of name -> class or function")
    return dict(value)


def environment(name: str, value: Any) -> dict[str, str | None]:
    """Check for environment variables; None unsets one."""
    found = objects(name, value)
    if not all(each is None or isinstance(each, str) for each in found.values()):
        raise TypeError(f"{name}={value!r}: expected a dict of variable -> text, or None to unset it")
    return found


def checkpoint(name: str, value: Any) -> Any:
    """Check for a ModelCheckpoint."""
    return c.instance("a ModelCheckpoint of Keras, or hvd.callbacks.BestModelCheckpoint()", "on_epoch_end")(name, value)


_CUSTOM: tuple[Any, ...] = (
    "custom_objects",
    {},
    objects,
    "Name -> class or function that Keras needs to load the model.",
)
_OTHER: dict[str, dict[str, Any]] = {
    "model": {"check": keras_model, "doc": "The built keras.Model to train; it is not changed."},
    "callbacks": {"doc": "Callbacks of Keras. They run on every rank, with metrics averaged over all ranks."},
    "input_shapes": {
        "doc": "Shape of each input with -1 for the rows; by default the model's, if it has as many elements."
    },
    "label_shapes": {"doc": "Shape of each label with -1 for the rows; by default the column's."},
    "label_dtypes": {"doc": "Dtype of each label; by default the column's, float32 for doubles."},
}

KERAS = tuple(replace(row, **_OTHER.get(row.name, {})) for row in (*SHARED, *BACKGROUND)) + rows(
    "Loss and optimizer",
    ("optimizer", None, optimizer, "An optimizer of Keras, or its name."),
    ("loss", None, c.anything, "A loss of Keras, its name, or a function; or a list or dict of these by output."),
    ("loss_weights", None, c.anything, "Weight of each output's loss: a list, or a dict by output."),
    (
        "metrics",
        [],
        c.anything,
        "Metrics of Keras: a list, or a list of lists or a dict by output. They apply sample weights.",
    ),
    ("scale_lr", True, c.flag, "Multiply the learning rate by the number of ranks, as in Horovod."),
    (
        "gradient_compression",
        None,
        c.compression,
        "hvd.Compression.fp16, .bf16, or an object with compress and decompress.",
    ),
    ("backward_passes_per_step", 1, c.whole(1), "Batches whose gradients are averaged into one step."),
    ("terminate_on_nan", True, c.flag, "Fail if a loss is not finite."),
    CHECKPOINT_EVERY,
    COMMIT_EVERY,
    (
        "checkpoint_callback",
        None,
        checkpoint,
        "A ModelCheckpoint. Its monitor and mode determine the best epoch; with save_best_only, fit returns the model "
        "of that epoch. The store's checkpoints are written instead of its file.",
    ),
    _CUSTOM,
    ("backend_env", {}, environment, "Environment variables of the ranks, set before Keras is imported."),
)

MODEL = tuple(
    replace(row, check=keras_model, doc="The trained keras.Model.") if row.name == "model" else row
    for row in TABLE
    if row.name not in ("optimizer", "loss", "loss_constructors")
) + rows("Model", _CUSTOM)

GONE = {
    **GONE_EVERYWHERE,
    "tensorflow_dataset_prefetch_buffer_size": "train_reader_num_workers threads read ahead; there is no tf.data",
    "lr_scheduler": "pass optimizer=keras.optimizers.Adam(a schedule of Keras) and scale_lr=False",
    "precision": "call keras.config.set_dtype_policy before you create the model",
    "gradient_clip_norm": "pass global_clipnorm= to the optimizer",
    "gradient_clip_value": "pass clipvalue= to the optimizer",
    "train_minibatch_fn": "override train_step of the model",
    "loss_constructors": "pass custom_objects=",
}
"""Parameters of Horovod or TorchEstimator that KerasEstimator lacks -> what to do instead."""
