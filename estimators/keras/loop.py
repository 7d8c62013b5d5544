"""The training of KerasEstimator: Keras' steps in each rank, with our data, checkpoints and history."""

from __future__ import annotations

import itertools
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.estimators.keras.measure import NOTHING, KerasMeasure, Logs, in_validation, joined, means_of
from spark_hvd.estimators.keras.module import Described
from spark_hvd.estimators.torch.learning_rate import check_described
from spark_hvd.estimators.training.history import History, Row
from spark_hvd.estimators.training.train import Job, Validates, not_finite, speed
from spark_hvd.store.errors import CheckpointError

_BEGINNING: dict[str, Any] = {"step": 0, "seconds": 0.0, "lr": None, "ranks": []}
"""The state at the beginning of an epoch."""


class KerasFramework(Validates):
    """Trains a Keras model."""

    def validate(self, job: Job, ranks: int) -> dict[str, float]:
        import keras

        module: Any = job.objects.model
        measure = KerasMeasure(job, Described.made(job.objects.optimizer, module.custom_objects))
        return measure.means(measure.validated(keras.callbacks.CallbackList(model=measure.model), ranks))

    def fit(self, job: Job) -> History:
        try:
            return _KerasFit(job).run()
        except Exception as error:
            # Raise the exception of a collective itself, and not TensorFlow's error around it.
            cause = None if "tensorflow" not in sys.modules else _raised_in_graph(error)
            if cause is None:
                raise
            raise cause from error


class _KerasFit(KerasMeasure):
    def __init__(self, job: Job) -> None:
        import spark_hvd.keras as keras_hvd
        from spark_hvd.estimators.keras.masked import share_losses

        self.keras_hvd = keras_hvd
        module: Any = job.objects.model
        made = Described.made(job.objects.optimizer, module.custom_objects)
        # With a scaled loss, a rank's gradients are its part of those of all rows. Means over its own rows could
        # overflow float16 where one process does not.
        scaled = hasattr(made, "inner_optimizer")
        self.divisor = 1 if scaled else hvd.size()
        self.optimizer = keras_hvd.DistributedOptimizer(
            made,
            op=hvd.Sum if scaled else hvd.Average,
            compression=job.objects.gradient_compression or hvd.Compression.none,
            backward_passes_per_step=job.spec.backward_passes_per_step,
            average_aggregated_gradients=True,
        )
        super().__init__(job, self.optimizer)
        self.sharing = share_losses(self.model, self.divisor)
        if scaled:
            self.optimizer.overflow_as_half(_computed_in_half(self.model))
        self.partial_epoch = job.partial_epoch
        self.stops_at_batches = any(map(_looks_at_batches, job.objects.callbacks))
        self.factor = 1.0  # of the learning rate, for the present number of ranks
        self._start()

    def _start(self) -> None:
        from spark_hvd.keras.backend import assign, name_of

        model, optimizer, resumed = self.model, self.optimizer, self.job.resumed
        optimizer.build(model.trainable_variables)
        trained = {id(each) for each in model.trainable_variables}
        names = [name_of(place, each) for place, each in enumerate(model.weights) if id(each) in trained]
        here = _described(self.job.objects.optimizer.config, names)
        self.described = check_described((resumed or {}).get("described"), here, self.spec.run_id, self.job.warns)
        if self.spec.scale_lr:
            self.factor = hvd.size() / (resumed["size"] if resumed else 1)
        if resumed is not None:
            names = [name_of(place, each) for place, each in enumerate(optimizer.variables)]
            _check_known(names, resumed["optimizer"], self.spec.run_id)
            for name, each in zip(names, optimizer.variables, strict=True):
                assign(each, resumed["optimizer"][name])
            self._resume_averages(resumed.get("averaged"))
        if self.factor != 1.0:
            optimizer.learning_rate = self._rate() * self.factor

    def _rest(self) -> dict[str, Any]:
        from spark_hvd.keras.backend import name_of, tensor_of

        variables = {name_of(place, each): tensor_of(each) for place, each in enumerate(self.optimizer.variables)}
        averaged = any(each._ema_weights_in_model for each in self._averaging())
        return {
            "optimizer": variables,
            "described": self.described,
            "averaged": self.spec.epochs if averaged else None,
        }

    def _averaging(self) -> list[Any]:
        """Return the callbacks that may leave averages in the model at the end of an epoch, until the next begins."""
        import keras

        return [each for each in self.job.objects.callbacks if isinstance(each, keras.callbacks.SwapEMAWeights)]

    def _resume_averages(self, epochs: int | None) -> None:
        """Prepare for a checkpoint with averages, of a run of ``epochs``; None if it has the weights themselves.

        Raises:
            CheckpointError: There are no weights to continue from.
        """
        run, found = f"the checkpoint of run_id={self.spec.run_id!r}", self._averaging()
        done = len(self.job.history)
        if epochs is not None and done < self.spec.epochs:
            if epochs == done:
                raise CheckpointError(
                    f"{run} is the end of its {epochs} epochs, where SwapEMAWeights(swap_on_epoch=True) keeps the "
                    "averages only: a run with more epochs needs another run_id"
                )
            if not any(each.swap_on_epoch for each in found):
                raise CheckpointError(
                    f"{run} has averages in place of the weights: callbacks must have SwapEMAWeights(swap_on_epoch="
                    "True), as then. Pass it, or another run_id"
                )
        for each in found:
            each._ema_weights_in_model = epochs is not None

    def _rate(self) -> float:
        import keras

        return float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))

    def run(self) -> History:
        import keras

        job, model, spec = self.job, self.model, self.spec
        callbacks = keras.callbacks.CallbackList(
            list(job.objects.callbacks), model=model, verbose=0, epochs=spec.epochs, steps=job.steps
        )
        model.stop_training = False
        job.begin()
        callbacks.on_train_begin()  # where one may load weights, on some hosts only
        self.keras_hvd.broadcast_variables([*model.weights, *self.optimizer.variables], 0)
        model.stop_training = model.stop_training or job.stopped
        logs: Logs = {}
        while len(job.history) < spec.epochs and not model.stop_training:
            logs = self._epoch(callbacks)
        self.optimizer.finalize_variable_values(model.trainable_variables)
        callbacks.on_train_end(logs)
        job.finish(job.objects.model.state_dict())
        return job.history

    def _epoch(self, callbacks: Any) -> Logs:
        from spark_hvd.keras.backend import assign

        job, model = self.job, self.model
        epoch = len(job.history)
        # An interrupted epoch continues from its checkpoint.
        partial, self.partial_epoch = self.partial_epoch or _BEGINNING, None
        done = partial["step"]
        steps = done + job.steps_left(done)
        self._seed(epoch, done)
        model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        rate = self._rate() if partial["lr"] is None else partial["lr"] * self.factor
        began = time.monotonic() - partial["seconds"]
        rows, metrics, latest = _of_this_rank(partial["ranks"])
        batches = itertools.islice(job.feed, steps - done)
        where: dict[str, Any] = {"epoch": epoch, "epochs": self.spec.epochs, "loss": lambda: latest.get("loss")}
        job.progress = hvd.progress(batches, total=steps - done, **where)
        for number, batch in enumerate(job.progress, done):
            given = self.given(batch)
            if number == done:
                self.prepare(batch)
                if self.model.train_function is None:
                    self.model.make_train_function()
                for variable, value in zip(self.model.metrics_variables, metrics, strict=False):  # none otherwise
                    assign(variable, value)
            weight = self.optimizer.weigh(job.feed.weight * self.divisor / hvd.size())
            callbacks.on_train_batch_begin(number)
            latest.update(self._step(given, weight))
            callbacks.on_train_batch_end(number, latest)
            rows += len(next(iter(batch.values())))
            if self.spec.terminate_on_nan and not math.isfinite(latest["loss"]):
                raise not_finite(self.spec, latest["loss"], epoch, number, steps, batch)
            if job.saves_after(number + 1) and number + 1 < steps:
                self._save_partial(number + 1, rows, latest, time.monotonic() - began, rate)
            if self.stops_at_batches and self._anyone_stops():
                job.feed.skip(steps - number - 1)
                break
        seconds, mine = time.monotonic() - began, self.measured(rows, latest)
        self._share_statistics()
        validates = job.validates
        validated = self._validate(callbacks) if validates else NOTHING
        ranks = hvd.allgather_object((mine, validated), name="spark_hvd.epoch")
        trained, validated_by_all = ([each[number] for each in ranks] for number in (0, 1))
        means = in_validation(self.together(validated_by_all))
        means = self.together(trained) | means
        job.add(means, lr=rate, **speed(seconds, sum(each["rows"] for each in trained)))
        with _without_warnings_of_missing_metrics(job.background_validation is not None):
            callbacks.on_epoch_end(epoch, _delayed(job.delayed_rows) | means)
        if self._anyone_stops() and not validates and job.validation is not None:
            job.validated(self.means(self._validate(callbacks)))
        job.report()
        job.save(job.objects.model.state_dict(), self._rest, stop=model.stop_training)
        return means

    def _anyone_stops(self) -> bool:
        """Return whether a callback of any rank has ended the training; all ranks know it from then on."""
        wish = torch.tensor([float(self.model.stop_training)], device="cpu")
        self.model.stop_training = bool(hvd.allreduce(wish, op=hvd.Max, name="spark_hvd.stop").item())
        return bool(self.model.stop_training)

    def _share_statistics(self) -> None:
        """Copy rank 0's running statistics to all ranks: they differ between ranks, and rank 0's are saved."""
        trained = {id(each) for each in self.model.trainable_weights}
        self.keras_hvd.broadcast_variables([each for each in self.model.weights if id(each) not in trained], 0)

    def _save_partial(self, step: int, rows: int, logs: Logs, seconds: float, rate: float) -> None:
        """Write a checkpoint within an epoch. Resuming from it gives the same result as this run, to the bit."""
        self._share_statistics()
        ranks = hvd.allgather_object(self.measured(rows, logs), name="spark_hvd.partial_epoch")
        partial = {"step": step, "seconds": seconds, "lr": rate, "ranks": ranks}
        self.job.save(self.job.objects.model.state_dict(), self._rest, partial)
        self._seed(len(self.job.history), step)

    def _validate(self, callbacks: Any) -> dict[str, Any]:
        if self.job.background_validation is not None:
            self.job.background_validation.end()
        return self.validated(callbacks)

    def _step(self, batch: tuple[Any, Any, Any], weight: Any) -> Logs:
        """Train on a batch; return the means of the epoch so far, which train_on_batch would reset."""
        self.sharing.weight = weight
        try:
            return {name: float(value) for name, value in self.model.train_function([batch]).items()}
        finally:
            self.sharing.weight = None  # ranks validate other numbers of batches

    def _seed(self, epoch: int, done: int) -> None:
        """Seed the layers, whose seeds are variables but not weights; differently on each rank and in each epoch."""
        self.job.seed(epoch, done)
        seeds = (each for each in self.model.variables if each.name == "seed_generator_state")
        for number, variable in enumerate(seeds):
            generator = torch.Generator().manual_seed(torch.initial_seed() + number)
            variable.assign(torch.randint(2**31 - 1, (2,), generator=generator, device="cpu").numpy().astype("uint32"))


def _computed_in_half(model: Any) -> list[Any]:
    """Return the variables whose gradients pass through float16."""
    layers = [layer for layer in model._flatten_layers() if layer.compute_dtype == "float16"]
    return [variable for layer in layers for variable in layer._trainable_variables if variable._autocast]


def _delayed(rows: Sequence[Row]) -> Logs:
    """Return the latest values of epochs that were validated in the background, for callbacks."""
    latest = max(rows, key=lambda row: row["epoch"], default={})
    return {name: value for name, value in latest.items() if name.startswith("val_")}


@contextmanager
def _without_warnings_of_missing_metrics(in_background: bool) -> Iterator[None]:
    """Hide warnings of Keras' callbacks for epochs without val_loss: in the background, most have none yet."""
    with warnings.catch_warnings():
        if in_background:
            warnings.filterwarnings("ignore", message=".* conditioned on metric `val_.*` which is not available")
        yield


def _described(config: Mapping[str, Any], trained: Sequence[str]) -> dict[str, Any]:
    """Return what a checkpoint records about an optimizer: its variables do not show which kind it is.

    Only the learning rate is a variable. The other options are always those of the present optimizer.
    """
    inner = config["config"]["inner_optimizer"] if config["class_name"] == "LossScaleOptimizer" else config
    rate = inner["config"].get("learning_rate")  # other classes need not have one there
    return {
        "optimizer": inner["class_name"],
        "lr_scheduler": rate["class_name"] if isinstance(rate, Mapping) else None,
        "parameters of the optimizer": [list(trained)],
        "options": [{"learning_rate": float(rate)} if isinstance(rate, int | float) else {}],
    }


def _check_known(names: Sequence[str], saved: Mapping[str, Any], run_id: str) -> None:
    """Check that a checkpoint has all variables of the optimizer; another optimizer's checkpoint does not.

    Raises:
        CheckpointError: A variable is missing.
    """
    if missing := [name for name in names if name not in saved]:
        raise CheckpointError(
            f"the checkpoint of run_id={run_id!r} has no {missing[0]!r} of the optimizer: it was written with another "
            "optimizer, or with a mixed_float16 model by an earlier version, which did not scale the loss. Delete the "
            "checkpoint, or pass another run_id"
        )


def _looks_at_batches(callback: Any) -> bool:
    """Return whether a callback may end the training between two batches."""
    import keras

    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    base = keras.callbacks.Callback
    # A LambdaCallback has its functions on the object.
    return any(getattr(getattr(callback, name), "__func__", None) is not getattr(base, name) for name in names)


def _raised_in_graph(error: Exception) -> Exception | None:
    import tensorflow as tf

    from spark_hvd.tensorflow.tensors import cause_of

    return cause_of(error) if isinstance(error, tf.errors.OpError) else None


def _of_this_rank(ranks: Sequence[Mapping[str, Any]]) -> tuple[int, list[torch.Tensor], Logs]:
    """Return what a checkpoint within an epoch has for this rank: rows, variables of metrics, and their values.

    If the number of ranks has changed, rank 0 gets the sums, so that all together have them once.
    """
    if len(ranks) == hvd.size():
        mine = ranks[hvd.rank()]
        return mine["rows"], mine["metrics"], dict(mine["logs"])
    if hvd.rank() or not ranks:
        return 0, [], {}
    sums = [joined("sum", each) for each in zip(*(rank["metrics"] for rank in ranks), strict=True)]
    return sum(rank["rows"] for rank in ranks), sums, means_of([(rank["rows"], rank["logs"]) for rank in ranks])
