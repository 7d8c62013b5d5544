"""The parameters of the estimators. Those that Horovod also has keep its names and meanings."""

from __future__ import annotations

from typing import Any

from spark_hvd.estimators.params import checks as c
from spark_hvd.estimators.params.params import rows
from spark_hvd.estimators.training.spec import PRECISIONS
from spark_hvd.runner.config import CHOICES

_BACKEND = c.instance("a SparkBackend or LocalBackend", "run", "num_processes")
_TRACKER = c.instance("a Tracker, such as spark_hvd.runner.MlflowTracker()", "start", "take", "end")

_MODEL = rows(
    "Model and columns",
    ("model", None, c.instance("a torch.nn.Module", "forward", "parameters"), "The model to train; it is not changed."),
    ("feature_cols", None, c.names, "Input columns of the model, one for each argument."),
    ("stack_features", False, c.flag, "Pass all feature_cols side by side as one argument (rows, numbers)."),
    ("label_cols", None, c.names, "Target columns, one for each output of the model."),
    ("sample_weight_col", None, c.text, "Column of weights, at least 0, for the loss of each row."),
    (
        "input_shapes",
        None,
        c.shapes,
        "Shape of each input: `[[-1, 1, 28, 28]]` with -1 for the rows, or `[[1, 28, 28]]`.",
    ),
    (
        "label_shapes",
        None,
        c.shapes,
        "The same for labels; by default the shape of the output, if it has as many elements.",
    ),
    ("input_dtypes", None, c.dtypes, "Dtype of each input; by default the column's, float32 for floating point."),
    (
        "label_dtypes",
        None,
        c.dtypes,
        "Dtype of each label; by default int64 for losses of class numbers, else float32.",
    ),
    ("decoders", {}, c.mapping_of_functions, "Binary column -> function from one value's bytes to an array."),
)

_WHERE = rows(
    "Where it runs",
    ("num_proc", None, c.whole(1), "Number of ranks; by default the number of slots in the cluster."),
    ("backend", None, _BACKEND, "A SparkBackend or LocalBackend that runs the ranks, instead of num_proc."),
    (
        "store",
        None,
        c.store,
        "A Store, or its path or URL, for data and checkpoints. Every executor must reach it. By default, data go "
        "straight to the ranks, and checkpoints to a temporary folder.",
    ),
    ("run_id", None, c.text, "Name of the run. If the store has a checkpoint of that run, the fit resumes from it."),
    ("max_restarts", 0, c.whole(0), "Maximum number of restarts after an executor is lost or a rank is killed."),
    (
        "min_num_proc",
        None,
        c.whole(1),
        "Minimum number of ranks after a loss; by default num_proc.",
    ),
    (
        "max_num_proc",
        None,
        c.whole(1),
        "Makes the fit elastic: it continues in memory if ranks are lost, and lets others join, up to this number.",
    ),
    (
        "tracker",
        None,
        _TRACKER,
        "Records the training elsewhere, from the driver, such as `MlflowTracker()`. Not saved.",
    ),
    ("use_gpu", True, c.flag, "Train on GPUs if the ranks have them."),
    ("verbose", 1, c.whole(0), "0: print nothing; 1: print a line for each epoch."),
    ("progress", "auto", c.one_of(*CHOICES), "How progress is shown; see docs/progress.md."),
)

_OUTPUTS = rows(
    "What transform appends",
    ("output_cols", None, c.names, "Name of each output's column; by default `<label>__output`."),
    (
        "prediction_col",
        "prediction",
        c.maybe_empty_text,
        "Column for the class or value, as a double; '' leaves it out.",
    ),
    (
        "probability_col",
        "probability",
        c.maybe_empty_text,
        "Column for the probabilities of the classes, as a vector; '' leaves it out.",
    ),
    (
        "raw_prediction_col",
        "rawPrediction",
        c.maybe_empty_text,
        "Column for the scores of the classes, as a vector; '' leaves it out.",
    ),
)

_LOOP = rows(
    "Training",
    ("batch_size", 32, c.whole(1), "Rows of a batch, on each rank."),
    ("epochs", 1, c.whole(1), "Passes over the data."),
    (
        "random_seed",
        None,
        c.whole(0),
        "The same seed, data and num_proc give the same weights; by default, a seed is drawn.",
    ),
    ("shuffle", True, c.flag, "Shuffle in each epoch: row groups over all data, rows within a window."),
    ("shuffle_buffer_size", None, c.whole(1), "Rows that are shuffled together; by default those in 64 MiB."),
    ("drop_last", False, c.flag, "Leave out the last batch of an epoch if it is not full."),
    ("train_steps_per_epoch", None, c.whole(1), "Batches per epoch on each rank; by default one pass over the data."),
    ("callbacks", [], c.callbacks, "Callbacks; see spark_hvd.estimators.Callback."),
    ("monitor", None, c.text, "Key of the history that determines the best epoch; by default val_loss, or loss."),
    ("monitor_mode", "min", c.one_of("min", "max"), "Whether the lowest or the highest value of monitor is best."),
    ("restore_best_weights", False, c.flag, "Return the model of the best epoch instead of the last."),
)

_VALIDATION = rows(
    "Validation",
    (
        "validation",
        None,
        c.fraction_or_column,
        "Share of rows for validation, or a column that is above 0 for these rows.",
    ),
    ("val_batch_size", None, c.whole(1), "Rows of a batch in validation; by default batch_size."),
    ("validation_steps_per_epoch", None, c.whole(1), "Batches per validation on each rank; by default all."),
)

BACKGROUND = rows(
    "Validation",
    (
        "validation_in_background",
        0,
        c.flag_or_number,
        "Validate checkpoints on free slots while the ranks continue training: True for one rank, or the number of "
        "ranks. The rows are written to the store.",
    ),
)

_DATA = rows(
    "Data",
    (
        "reader",
        None,
        c.one_of("arrow", "petastorm"),
        "What reads the rows; by default Petastorm for data with a Unischema, else Arrow.",
    ),
    (
        "transformation_fn",
        None,
        c.function,
        "Function, called in ranks, from a pandas DataFrame to another with as many rows.",
    ),
    (
        "transformation_edit_fields",
        None,
        c.edit_fields,
        "(name, numpy dtype, shape, nullable) of each column that transformation_fn adds or changes.",
    ),
    ("transformation_removed_fields", None, c.names, "Columns that transformation_fn removes."),
    ("partitions_per_process", 10, c.whole(1), "Row groups to write for each rank, if there are enough rows."),
    ("compress_sparse_cols", False, c.flag, "Store vector columns as indices and values."),
    ("inmemory_cache_all", False, c.flag, "Keep each rank's rows in memory after the first epoch."),
    ("train_reader_num_workers", 2, c.whole(1), "Threads that read ahead; with Petastorm, workers."),
    ("val_reader_num_workers", 2, c.whole(1), "The same in validation."),
    ("reader_pool_type", "thread", c.one_of("thread", "process", "dummy"), "Kind of worker that Petastorm uses."),
)

CHECKPOINT_EVERY: Any = (
    "checkpoint_every",
    None,
    c.whole(1),
    "Batches between checkpoints within an epoch; by default, checkpoints are written after epochs only.",
)

COMMIT_EVERY: Any = (
    "commit_every",
    None,
    c.whole(1),
    "Batches between commits of an elastic fit; by default those of 16 steps.",
)

_TORCH = rows(
    "Loss and optimizer",
    (
        "optimizer",
        None,
        c.optimizer,
        "A torch optimizer of model.parameters(), or a function from the parameters to one.",
    ),
    ("loss", None, c.losses, "Function from (output, label) to a number, or a list with one for each label."),
    ("loss_weights", None, c.numbers, "Weight of each label's loss; by default 1 / labels."),
    ("loss_constructors", None, c.functions, "Functions that make the losses in the ranks, instead of loss."),
    (
        "metrics",
        [],
        c.function_groups,
        "Functions of (output, label) to report, or a list of such lists, one for each label.",
    ),
    ("scale_lr", True, c.flag, "Multiply learning rates by the number of ranks, as in Horovod."),
    (
        "lr_scheduler",
        None,
        c.scheduler,
        "A torch scheduler of the optimizer, or a function from the optimizer (and `total_steps`) to one.",
    ),
    (
        "lr_scheduler_interval",
        "epoch",
        c.one_of("epoch", "step"),
        "When the scheduler steps: after each epoch, or after each step.",
    ),
    (
        "gradient_compression",
        None,
        c.compression,
        "hvd.Compression.fp16, .bf16, or an object with compress and decompress.",
    ),
    ("backward_passes_per_step", 1, c.whole(1), "Batches whose gradients are averaged into one step."),
    ("precision", "32", c.one_of(*PRECISIONS), "Precision of forward and loss: float32, or autocast to bf16 or fp16."),
    ("gradient_clip_norm", None, c.number(above=0), "Maximum norm of all gradients together, after averaging."),
    ("gradient_clip_value", None, c.number(above=0), "Maximum absolute value of an element of a gradient."),
    ("terminate_on_nan", True, c.flag, "Fail if a loss is not finite; otherwise skip such steps and continue."),
    CHECKPOINT_EVERY,
    COMMIT_EVERY,
    (
        "train_minibatch_fn",
        None,
        c.function,
        "Replaces forward, backward and step. Called with those of these arguments that it declares: model, optimizer, "
        "transform_outputs, loss_fn, inputs, labels, sample_weights, backward_passes_per_step, batch_idx. Returns "
        "(outputs, loss).",
    ),
)

SHARED = _MODEL + _WHERE + _LOOP + _VALIDATION + _DATA + _OUTPUTS
TORCH = _MODEL + _WHERE + _LOOP + _VALIDATION + BACKGROUND + _DATA + _OUTPUTS + _TORCH

MODEL_SETTINGS = (
    "input_shapes",
    "input_dtypes",
    "decoders",
    "use_gpu",
    "output_cols",
    "prediction_col",
    "probability_col",
    "raw_prediction_col",
)
"""Parameters that the model inherits from the estimator."""

GONE = {
    "mp_start_method": "ranks are forked from a server that the runner keeps; there is nothing to choose",
    "data_module": "use reader='arrow' or reader='petastorm'",
    "categorical_cols": "it was for NVTabular only; index strings with pyspark.ml.feature.StringIndexer",
    "continuous_cols": "it was for NVTabular only",
}
"""Parameters of Horovod that do not exist here -> what to do instead."""
