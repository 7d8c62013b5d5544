"""The training of KerasEstimator: Keras' steps in each rank, between our data, checkpoints and history."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.keras.module import Described, given_to_keras
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.inputs import tensors_of
from spark_hvd.estimators.training.spec import Objects, TrainSpec
from spark_hvd.estimators.training.train import Framework, Job, not_finite, speed

Logs = dict[str, float]


class KerasFramework(Framework):
    """Trains a Keras model."""

    def fit(self, job: Job) -> History:
        """See base class."""
        return _KerasFit(job).run()


def compiled(spec: TrainSpec, objects: Objects, optimizer: Any) -> Any:
    """The model, with its losses and metrics and this optimizer."""
    module: Any = objects.model
    model, custom = module.keras_model, module.custom_objects
    loss, weights = objects.loss
    metrics = Described.made(objects.metrics, custom) or None
    model.compile(
        optimizer,
        Described.made(loss, custom),
        loss_weights=weights,
        jit_compile=False,
        auto_scale_loss=False,  # a LossScaleOptimizer is outside what reduces gradients
        **{"weighted_metrics" if spec.sample_weight_col else "metrics": metrics},
    )
    return model


def batch_of(spec: TrainSpec, batch: Batch, device: torch.device | str = "cpu") -> tuple[Any, Any, Any]:
    """What a step takes: inputs, labels and weights, each alone or as a list of several."""
    inputs, labels = tensors_of(spec.inputs, batch, device), tensors_of(spec.labels, batch, device)
    weights = batch[spec.sample_weight_col].to(device) if spec.sample_weight_col else None
    several = None if weights is None else [weights] * len(labels)
    return _one(inputs), _one(labels), several if several is None else _one(several)


def _one(values: Sequence[torch.Tensor]) -> Any:
    taken = [given_to_keras(value) for value in values]
    return taken[0] if len(taken) == 1 else taken


class _KerasFit:
    def __init__(self, job: Job) -> None:
        import spark_hvd.keras as keras_hvd

        self.job, self.spec, self.keras_hvd = job, job.spec, keras_hvd
        module: Any = job.objects.model
        self.optimizer = keras_hvd.DistributedOptimizer(
            Described.made(job.objects.optimizer, module.custom_objects),
            compression=job.objects.gradient_compression or hvd.Compression.none,
            backward_passes_per_step=self.spec.backward_passes_per_step,
            average_aggregated_gradients=True,
        )
        self.model = compiled(self.spec, job.objects, self.optimizer)
        self._start()

    def _start(self) -> None:
        from spark_hvd.keras.backend import assign, name_of

        model, optimizer, resumed = self.model, self.optimizer, self.job.resumed
        optimizer.build(model.trainable_variables)
        factor = float(hvd.size()) if self.spec.scale_lr else 1.0
        if resumed is not None:
            factor /= resumed["size"] if self.spec.scale_lr else 1.0
            for place, each in enumerate(optimizer.variables):
                assign(each, resumed["optimizer"][name_of(place, each)])
        if factor != 1.0:
            optimizer.learning_rate = self._rate() * factor
        self.keras_hvd.broadcast_variables([*model.weights, *optimizer.variables], 0)

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        from spark_hvd.keras.backend import name_of, tensor_of

        return {name_of(place, each): tensor_of(each) for place, each in enumerate(self.optimizer.variables)}

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
        callbacks.on_train_begin()
        logs: Logs = {}
        while len(job.history) < spec.epochs and not model.stop_training:
            logs = self._epoch(callbacks)
        callbacks.on_train_end(logs)
        return job.history

    def _epoch(self, callbacks: Any) -> Logs:
        job, model = self.job, self.model
        epoch = len(job.history)
        self._seed(epoch)
        model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        rate, began, rows = self._rate(), time.monotonic(), 0
        latest: Logs = {}
        batches = itertools.islice(job.feed, job.steps)
        where: dict[str, Any] = {"epoch": epoch, "epochs": self.spec.epochs, "loss": lambda: latest.get("loss")}
        job.progress = hvd.progress(batches, total=job.steps, **where)
        for number, batch in enumerate(job.progress):
            callbacks.on_train_batch_begin(number)
            inputs, labels, weights = batch_of(self.spec, batch, job.device)
            latest.update(self._step(inputs, labels, weights))
            callbacks.on_train_batch_end(number, latest)
            rows += len(next(iter(batch.values())))
            if self.spec.terminate_on_nan and not math.isfinite(latest["loss"]):
                raise not_finite(latest["loss"], epoch, number, job.steps, batch)
        mine, seconds = dict(latest), time.monotonic() - began
        if epoch + 1 == self.spec.epochs:
            self.optimizer.finalize_variable_values(model.trainable_variables)
        trained = {id(each) for each in model.trainable_weights}
        # Running statistics differ between ranks; rank 0's are the ones that are saved.
        self.keras_hvd.broadcast_variables([each for each in model.weights if id(each) not in trained], 0)
        validated, val_rows = self._validate()
        ranks = hvd.allgather_object((rows, mine, val_rows, validated), name="spark_hvd.epoch")
        means = _means([(each[0], each[1]) for each in ranks]) | {
            f"val_{name}": value for name, value in _means([(each[2], each[3]) for each in ranks]).items()
        }
        job.add(means, lr=rate, **speed(seconds, sum(each[0] for each in ranks)))
        callbacks.on_epoch_end(epoch, dict(means))
        job.save(job.objects.model.state_dict(), lambda: {"optimizer": self._optimizer_state()})
        job.report()
        if job.objects.callbacks:
            wishes = hvd.allgather_object(bool(model.stop_training), name="spark_hvd.stop")
            model.stop_training = any(wishes)
        return means

    def _step(self, *batch: Any) -> Logs:
        """Train on a batch; the means of the epoch so far."""
        model = self.model
        if model.train_function is None:
            model.test_on_batch(*batch)  # makes the variables of the metrics, and trains nothing
            model.make_train_function()
            model.reset_metrics()
        # train_on_batch would begin the means anew.
        return {name: float(value) for name, value in model.train_function([batch]).items()}

    def _validate(self) -> tuple[Logs, int]:
        if self.job.validation is None:
            return {}, 0
        self.model.reset_metrics()
        rows, logs = 0, Logs()
        for batch in self.job.validation_batches():
            found = self.model.test_function([batch_of(self.spec, batch, self.job.device)])
            logs = {name: float(value) for name, value in found.items()}
            rows += len(next(iter(batch.values())))
        return logs, rows

    def _seed(self, epoch: int) -> None:
        """Seeds of layers, which Keras keeps in variables that are no weights: others on each rank, in each epoch."""
        self.job.seed(epoch)
        for number, variable in enumerate(_seeds(self.model)):
            generator = torch.Generator().manual_seed(torch.initial_seed() + number)
            variable.assign(torch.randint(2**31 - 1, (2,), generator=generator).numpy().astype("uint32"))


def _seeds(model: Any) -> Iterator[Any]:
    return (each for each in model.variables if each.name == "seed_generator_state")


def _means(ranks: Sequence[tuple[int, Mapping[str, float]]]) -> Logs:
    """Means over the rows of all ranks."""
    rows = sum(count for count, _ in ranks)
    names = dict.fromkeys(name for _, logs in ranks for name in logs)
    return {name: sum(count * float(logs.get(name, 0.0)) for count, logs in ranks) / rows for name in names}
