"""The parameters of LightningEstimator: those that all estimators share, and those of its Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spark_hvd.estimators.lightning.parts import PROFILERS
from spark_hvd.estimators.params import checks
from spark_hvd.estimators.params.params import rows
from spark_hvd.estimators.params.tables import CHECKPOINT_EVERY, SHARED
from spark_hvd.estimators.params.tables import GONE as GONE_EVERYWHERE

TASKS = ("multiclass", "binary", "regression")

_DECIDED = {
    "accelerator": "use_gpu decides, if ranks have GPUs",
    "barebones": "it would turn off the source of the history and checkpoints",
    "callbacks": "pass callbacks= to the estimator",
    "default_root_dir": "files go to the store, logs_path(run_id)",
    "devices": "each rank has one device; num_proc is the number of ranks",
    "enable_checkpointing": "each epoch is written to the store; a ModelCheckpoint in callbacks= writes further files",
    "enable_progress_bar": "verbose=2 shows it",
    "fast_dev_run": "fit tries one batch on the driver anyway; for a short run, pass epochs=1, train_steps_per_epoch=1",
    "log_every_n_steps": "pass log_every_n_steps= to the estimator",
    "logger": "pass logger= to the estimator",
    "max_epochs": "pass epochs= to the estimator",
    "num_nodes": "Spark places the ranks; num_proc is their number",
    "overfit_batches": "limit the DataFrame, or pass train_steps_per_epoch= to the estimator",
    "profiler": "pass profiler= to the estimator",
    "reload_dataloaders_every_n_epochs": "the data is read again in each epoch",
    "strategy": "the ranks exist before the Trainer, which averages gradients over them as DDP does",
    "use_distributed_sampler": "each rank reads its own share of the data",
}
"""Keywords of the Trainer that cannot be set -> what to do instead."""


def _module(name: str, value: Any) -> Any:
    """Return a LightningModule if `value` is one; TypeError: it is not."""
    if isinstance(value, type) or not all(callable(getattr(value, m, None)) for m in ("forward", "parameters")):
        raise TypeError(f"{name}={value!r}: expected a LightningModule (an object, not a class)")
    # By name, because there are two packages, lightning and pytorch_lightning, and neither need be imported here.
    if not any(base.__name__ == "LightningModule" for base in type(value).__mro__):
        raise TypeError(
            f"{name} is a {type(value).__name__}, not a LightningModule: pass it to TorchEstimator, or call it in the "
            "training_step of a LightningModule"
        )
    return value


def _logger(name: str, value: Any) -> Any:
    """Return True, False or a list of loggers; TypeError: `value` is none of these, and no logger."""
    if isinstance(value, bool):
        return value
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    for item in found:
        if isinstance(item, type) or not callable(getattr(item, "log_metrics", None)):
            raise TypeError(f"{name}={value!r}: expected a logger of Lightning, a list of them, True or False")
    return found


def _profiler(name: str, value: Any) -> Any:
    """Return a profiler or the name of one; TypeError or ValueError: `value` is neither."""
    if isinstance(value, str):
        return checks.one_of(*PROFILERS)(name, value)
    return checks.instance(f"a profiler of Lightning, or one of {', '.join(PROFILERS)}", "profile", "summary")(
        name, value
    )


def _trainer_args(name: str, value: Any) -> dict[str, Any]:
    """Return the Trainer's keywords as a dict; ValueError: one of them is decided elsewhere, TypeError: no keywords."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name}={value!r}: expected a dict of keywords of lightning.Trainer")
    for key in value:
        if key in _DECIDED:
            raise ValueError(f"{name}[{key!r}] cannot be set: {_DECIDED[key]}")
    return dict(value)


_OWN_STEP = "a LightningModule has its own, in training_step"
_OWN_OPTIMIZER = "a LightningModule has its own, in configure_optimizers"

GONE = {
    **GONE_EVERYWHERE,
    "loss": f"{_OWN_STEP}. task= says what outputs mean, if transform should append prediction and probability",
    "loss_weights": _OWN_STEP,
    "loss_constructors": _OWN_STEP,
    "metrics": f"{_OWN_STEP} and validation_step, by self.log",
    "train_minibatch_fn": f"{_OWN_STEP}; with automatic_optimization=False it also does backward and step",
    "optimizer": _OWN_OPTIMIZER,
    "lr_scheduler": _OWN_OPTIMIZER,
    "lr_scheduler_interval": _OWN_OPTIMIZER,
    "scale_lr": f"{_OWN_OPTIMIZER}, where self.trainer.world_size is the number of ranks",
    "gradient_compression": "DDP averages the gradients",
    "backward_passes_per_step": "pass trainer_args={'accumulate_grad_batches': ...}",
    "precision": "pass trainer_args={'precision': 'bf16-mixed'}",
    "gradient_clip_norm": "pass trainer_args={'gradient_clip_val': ...}",
    "gradient_clip_value": "pass trainer_args={'gradient_clip_val': ..., 'gradient_clip_algorithm': 'value'}",
    "validation_in_background": "Lightning's callbacks, schedulers and checkpoints need the values of a validation "
    "before the epoch ends. trainer_args={'check_val_every_n_epoch': ...} validates less often",
    "num_gpus": "use_gpu=True gives each rank the GPU that Spark assigned to it",
    "loader_num_epochs": "epochs determines how long readers continue",
    "debug_data_loader": "there is no debug output to turn on",
    "train_async_data_loader_queue_size": "train_reader_num_workers threads read ahead",
    "val_async_data_loader_queue_size": "val_reader_num_workers threads read ahead",
}
"""Parameters of Horovod or TorchEstimator that LightningEstimator lacks -> what to do instead."""

_CHANGED: dict[str, dict[str, Any]] = {  # shared parameters with another check or doc here
    "model": {
        "check": _module,
        "doc": "The LightningModule to train; it is not changed. Its steps get a dict of column name -> tensor, with "
        "feature, label and weight columns. In transform, `forward` gets one argument for each feature.",
    },
    "callbacks": {"doc": "Callbacks of Lightning. Files of a ModelCheckpoint are copied to the store's logs."},
    "verbose": {"doc": "0: print nothing; 1: print a line for each epoch; 2: also show Lightning's progress bar."},
    "label_dtypes": {
        "doc": 'Dtype of each label; by default int64 with task="multiclass", float32 with other tasks, the column\'s '
        "without task."
    },
    "label_shapes": {"doc": "The same for labels, such as `[[-1, 1]]`."},
    "sample_weight_col": {
        "doc": "Column of weights, at least 0. Steps find it in their batch by its name, and must apply it themselves."
    },
}

LIGHTNING = tuple(replace(row, **_CHANGED.get(row.name, {})) for row in SHARED) + rows(
    "Lightning",
    (
        "task",
        None,
        checks.one_of(*TASKS),
        "What `forward` returns: multiclass (a logit for each class), binary (a logit) or regression (a value). "
        "transform then appends prediction and probability; by default it appends the outputs only.",
    ),
    (
        "logger",
        None,
        _logger,
        "A logger of Lightning, or a list of them; by default CSVLogger. True: Lightning's default; False: none. Its "
        "files are copied to the store's logs after every epoch.",
    ),
    ("log_every_n_steps", 50, checks.whole(1), "Batches between two entries of the logger."),
    (
        "profiler",
        None,
        _profiler,
        'A profiler of Lightning, or its name: "simple", "advanced", "pytorch". It writes to the store\'s logs.',
    ),
    CHECKPOINT_EVERY,
    (
        "commit_every",
        None,
        checks.whole(1),
        "Batches between commits of an elastic fit; by default after epochs only, because each commit copies "
        "everything that Lightning saves.",
    ),
    ("terminate_on_nan", True, checks.flag, "Fail if training_step returns a loss that is not finite."),
    (
        "find_unused_parameters",
        None,
        checks.flag,
        "Allow parameters without a gradient; by default only with manual optimization.",
    ),
    (
        "trainer_args",
        {},
        _trainer_args,
        "Other keywords of lightning.Trainer, such as precision and gradient_clip_val.",
    ),
)
