"""The parameters that all classifiers have. Those that TorchEstimator also has mean the same."""

from __future__ import annotations

from dataclasses import replace

from spark_hvd.estimators.classifiers.labels import Labels
from spark_hvd.estimators.params import checks as c
from spark_hvd.estimators.params.params import Parameter, rows
from spark_hvd.estimators.params.tables import TORCH
from spark_hvd.estimators.training.history import as_history

_TORCH = {row.name: row for row in TORCH}
_OUTPUTS = rows(
    "What transform appends",
    (
        "prediction_col",
        "prediction",
        c.maybe_empty_text,
        "Column for the class: text, boolean and arrays as in the data, numbers as double; '' leaves it out.",
    ),
    (
        "probability_col",
        "probability",
        c.maybe_empty_text,
        "Column for the probabilities of the classes, as a vector; '' leaves it out.",
    ),
    (
        "threshold",
        0.5,
        c.number(at_least=0),
        "Probability from which a class is predicted, if rows have several classes (arrays of 0/1).",
    ),
)


def _as_in_torch(group: str, *names: str) -> tuple[Parameter, ...]:
    return tuple(replace(_TORCH[name], group=group) for name in names)


def estimator_table(*own: Parameter) -> tuple[Parameter, ...]:
    """Return the table of a classifier with its ``own`` parameters."""
    where = "num_proc backend store run_id max_restarts min_num_proc tracker use_gpu verbose progress"
    rest = "random_seed precision backward_passes_per_step gradient_compression checkpoint_every callbacks monitor"
    return (
        *own,
        *rows(
            "Training",
            ("epochs", 3, c.whole(1), "Passes over the data."),
            ("batch_size", 32, c.whole(1), "Rows of a batch, on each rank."),
            ("learning_rate", None, c.number(above=0), "Peak learning rate of AdamW; by default the model's."),
            (
                "warmup",
                0.1,
                c.number(at_least=0),
                "Share of all steps in which the learning rate rises; then it falls to 0.",
            ),
            ("weight_decay", 0.01, c.number(at_least=0), "Weight decay of AdamW, for matrices only."),
            (
                "gradient_clip_norm",
                1.0,
                c.number(above=0),
                "Maximum norm of all gradients together; inf turns clipping off.",
            ),
        ),
        *_as_in_torch("Training", *rest.split(), "monitor_mode", "restore_best_weights"),
        *_as_in_torch("Validation", "validation", "val_batch_size"),
        *_as_in_torch("Where it runs", *where.split()),
        *_OUTPUTS,
    )


def model_table(*own: Parameter) -> tuple[Parameter, ...]:
    """Return the table of a classifier's model with its ``own`` parameters."""
    return (
        *own,
        *rows(
            "Model",
            ("labels", None, c.instance("Labels", "to_json", "tensor"), "The classes that fit found."),
            ("history", None, as_history, "The metrics of each epoch."),
            ("run_id", None, c.text, "The run that trained it."),
            ("batch_size", 256, c.whole(1), "Rows of a batch in transform."),
        ),
        *_as_in_torch("Model", "use_gpu"),
        *_OUTPUTS,
    )


LABELS_FROM_JSON = {"labels": Labels.from_json}
