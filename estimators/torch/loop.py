"""The training loop of TorchEstimator: forward, backward, step; the same on every rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.torch.learning_rate import (
    Scheduler,
    check_described,
    described,
    load,
    make_optimizer,
    make_scheduler,
    options_of,
)
from spark_hvd.estimators.torch.measure import Measure
from spark_hvd.estimators.torch.objective import Sums, ValidationSums
from spark_hvd.estimators.training.callbacks import TrainState
from spark_hvd.estimators.training.history import History, monitored
from spark_hvd.estimators.training.inputs import outputs_of
from spark_hvd.estimators.training.spec import calling
from spark_hvd.estimators.training.train import NAN_CHECK_EVERY, Job, Validates, not_finite, speed

_BEGINNING: dict[str, Any] = {"step": 0, "skipped": 0, "seconds": 0.0, "sums": [], "lr": None}
"""The state at the beginning of an epoch."""


class TorchFramework(Validates):
    """Trains a plain ``torch.nn.Module``."""

    def fit(self, job: Job) -> History:
        return _Loop(job).run()

    def validate(self, job: Job, ranks: int) -> dict[str, float]:
        measure = Measure(job)
        return measure.means(measure.validated(ranks))


class _Loop(Measure):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        spec, objects = job.spec, job.objects
        self.scaled = 1.0
        self.optimizer, self.scheduler = self._optimizer()
        self.scaler = torch.amp.GradScaler(job.device.type, enabled=spec.precision == "fp16")
        if job.resumed and job.resumed.get("scaler"):
            self.scaler.load_state_dict(job.resumed["scaler"])
        self.minibatch = calling(objects.train_minibatch_fn) if objects.train_minibatch_fn else None
        self.synchronizes = any(isinstance(module, hvd.SyncBatchNorm) for module in self.model.modules())
        self.skipped = 0
        self.partial_epoch = job.partial_epoch
        self.state = TrainState(
            rank=hvd.rank(),
            size=hvd.size(),
            epochs=spec.epochs,
            steps=job.steps,
            model=self.model,
            optimizer=self.optimizer,
            store=spec.store,
            run_id=spec.run_id,
            epoch=len(job.history),
            global_step=job.resumed["global_step"] if job.resumed else 0,
            history=job.history,
            stop=job.stopped,
            validation_in_background=job.background_validation is not None,
        )

    def _optimizer(self) -> tuple[Any, Scheduler | None]:
        spec, objects, resumed = self.spec, self.job.objects, self.job.resumed
        optimizer = make_optimizer(objects.optimizer, self.model)
        options = options_of(optimizer)
        steps = -(-self.job.steps // spec.backward_passes_per_step) * spec.epochs
        scheduler = make_scheduler(objects.lr_scheduler, optimizer, hvd.size() if spec.scale_lr else 1, steps)
        here = described(self.model, [optimizer], [scheduler] if scheduler else [], options)
        self.described = check_described((resumed or {}).get("described"), here, spec.run_id, self.job.warns)
        if resumed:
            self.scaled = hvd.size() / resumed["size"] if spec.scale_lr else 1.0
            load(objects.lr_scheduler, optimizer, scheduler, resumed, self.scaled)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        reduced = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=_named(self.model, optimizer),
            compression=objects.gradient_compression or hvd.Compression.none,
            backward_passes_per_step=spec.backward_passes_per_step,
        )
        if self.job.state is not None:
            self.job.state.optimizer = reduced
        return reduced, scheduler

    def run(self) -> History:
        state, callbacks = self.state, self.job.objects.callbacks
        self.job.begin()
        for callback in callbacks:
            callback.on_train_begin(state)
        while state.epoch < self.spec.epochs and not state.stop:
            self._epoch()
        for callback in callbacks:
            callback.on_train_end(state)
        self.job.finish(self.model.state_dict())
        return state.history

    def _epoch(self) -> None:
        state, job = self.state, self.job
        # An interrupted epoch continues from its checkpoint.
        partial, self.partial_epoch = self.partial_epoch or _BEGINNING, None
        state.step, self.skipped = partial["step"], partial["skipped"]
        state.steps = state.step + job.steps_left(state.step)
        job.seed(state.epoch, state.step)
        for callback in job.objects.callbacks:
            callback.on_epoch_begin(state)
        rate = self.optimizer.param_groups[0]["lr"] if partial["lr"] is None else partial["lr"] * self.scaled
        began = time.monotonic() - partial["seconds"]
        self.model.train()
        sums = Sums(self.metrics.names, job.device)
        if partial["sums"]:
            sums.values = _on_rank_0(torch.tensor(partial["sums"], dtype=sums.values.dtype, device=job.device))
        self.optimizer.zero_grad()
        left = state.steps - state.step
        where: dict[str, Any] = {"epoch": state.epoch, "epochs": self.spec.epochs}
        job.progress = hvd.progress(itertools.islice(job.feed, left), total=left, loss=lambda: state.loss, **where)
        for number, batch in enumerate(job.progress, state.step):
            self._batch(batch, number, sums)
            if job.saves_after(state.step) and state.step < state.steps:
                self._save_partial(sums, began, rate)
        seconds = time.monotonic() - began
        validated = job.validates
        self._share_buffers()
        validation = self._validate() if validated else self.no_validation()
        stop = torch.tensor([float(state.stop)], dtype=torch.float64, device=job.device)
        # The only exchange of an epoch: sums of training and validation, and whether any rank wants to stop.
        total = hvd.allreduce(torch.cat([sums.values, validation.values, stop]), op=hvd.Sum, name="spark_hvd.epoch")
        values = total.tolist()
        width = len(sums.values)
        means = Sums.means(sums.names, values[:width])
        if validated:
            means |= validation.means_of(values[width:-1])
        skipped = {"skipped_steps": self.skipped} if self.skipped else {}
        job.add(means, lr=rate, **speed(seconds, values[0]), **skipped)
        self._schedule("epoch", job.history[-1], *job.delayed_rows)
        state.stop = values[-1] > 0
        for callback in job.objects.callbacks:
            callback.on_epoch_end(state)
        state.stop = self._anyone_stops(state.stop)
        if state.stop and not validated and job.validation is not None:
            job.validated(self.means(self._validate()))
        job.report()
        if state.rank == 0 and state.stop and state.stop_reason and self.spec.verbose:
            print(state.stop_reason, flush=True)
        job.save(self.model.state_dict(), self._rest, stop=state.stop)
        state.epoch += 1

    def _save_partial(self, sums: Sums, began: float, rate: float) -> None:
        """Write a checkpoint within an epoch. Resuming from it gives the same result as this run, to the bit."""
        state = self.state
        self._share_buffers()
        total = hvd.allreduce(sums.values, op=hvd.Sum, name="spark_hvd.partial_epoch")
        sums.values = _on_rank_0(total)
        seconds = time.monotonic() - began
        partial = {"step": state.step, "skipped": self.skipped, "seconds": seconds, "sums": total.tolist(), "lr": rate}
        self.job.save(self.model.state_dict(), self._rest, partial)
        self.job.seed(state.epoch, state.step)

    def _anyone_stops(self, stop: bool) -> bool:
        if not self.job.objects.callbacks:
            return stop
        wishes = hvd.allreduce(torch.tensor([float(stop)], device="cpu"), op=hvd.Max, name="spark_hvd.stop")
        return bool(wishes.item())

    def _batch(self, batch: Batch, number: int, sums: Sums) -> None:
        spec, state, device = self.spec, self.state, self.job.device
        inputs, labels, weights = self._on_device(batch)
        last = (number + 1) % spec.backward_passes_per_step == 0 or number + 1 == self.state.steps
        # The last step of an epoch may consist of fewer passes.
        begun = number - number % spec.backward_passes_per_step
        passes = min(spec.backward_passes_per_step, state.steps - begun)
        # The loss is weighted by this batch's share of the batches of all ranks.
        self.objective.factors = self.shares.of(labels, len(inputs[0]), self.job.feed.weight)
        if self.minibatch is not None:
            outputs, loss = self.minibatch(
                model=self.model,
                optimizer=self.optimizer,
                transform_outputs=self.objective.transform_outputs,
                loss_fn=self.objective,
                inputs=inputs,
                labels=labels,
                sample_weights=weights,
                backward_passes_per_step=spec.backward_passes_per_step,
                batch_idx=number,
            )
            outputs, labels = self.objective.transform_outputs(outputs_of(outputs), labels)
            if last:
                self._schedule("step")
        elif len(inputs[0]) or self.synchronizes:
            # Without rows, as all were skipped, it takes part in what the others' layers exchange.
            objective = self.objective if len(inputs[0]) else _zero
            outputs, labels, loss = self._forward(inputs, labels, weights, objective)
            torch.autograd.backward(self.scaler.scale(loss / passes))
            if last:
                self._step()
        else:  # all its rows were skipped: it contributes zeros to the others' gradients
            loss = torch.zeros((), device=device)
            if last:
                self._step()
        state.loss = self._by_row(loss)
        state.step, state.global_step = number + 1, state.global_step + 1
        looked_at = device.type == "cpu" or number % NAN_CHECK_EVERY == 0 or number + 1 == state.steps
        if spec.terminate_on_nan and looked_at:
            value = float(state.loss)
            if value - value != 0.0:
                raise not_finite(spec, value, state.epoch, number, state.steps, batch)
        if len(inputs[0]):
            sums.add(len(inputs[0]), state.loss, self.metrics(outputs, labels))
        for callback in self.job.objects.callbacks:
            callback.on_batch_end(state)

    def _step(self) -> None:
        spec, optimizer = self.spec, self.optimizer
        optimizer.synchronize()
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        self.scaler.unscale_(optimizer)
        if spec.gradient_clip_value is not None:
            torch.nn.utils.clip_grad_value_(params, spec.gradient_clip_value)
        if spec.gradient_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, spec.gradient_clip_norm)
        # Gradients are the same on all ranks by now, so all ranks decide the same.
        finite = spec.terminate_on_nan or self.scaler.is_enabled() or _finite(params)
        with optimizer.skip_synchronize():
            if finite:
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                self.skipped += 1
        optimizer.zero_grad()
        if finite:
            self._schedule("step")

    def _schedule(self, interval: str, *rows: dict[str, Any]) -> None:
        """Step the scheduler; ``rows`` are this epoch's, and earlier ones that have new values since the last call."""
        if self.scheduler is not None and self.spec.lr_scheduler_interval == interval:
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                key = monitored(rows[0], self.spec.monitor, in_background=self.job.background_validation is not None)
                of_training = key in rows[0] and not key.startswith("val_")
                for row in rows[:1] if of_training else sorted(rows, key=lambda row: int(row["epoch"])):
                    if key in row:
                        self.scheduler.step(row[key])
            else:
                self.scheduler.step()

    def _validate(self) -> ValidationSums:
        if self.job.background_validation is not None:
            self.job.background_validation.end()
        return self.validated()

    def _share_buffers(self) -> None:
        buffers = dict(self.model.named_buffers())
        if buffers and hvd.size() > 1:  # running statistics differ between ranks; rank 0's are saved
            hvd.broadcast_parameters(buffers, root_rank=0)

    def _rest(self) -> dict[str, Any]:
        return {
            "global_step": self.state.global_step,
            "optimizer": self.optimizer.state_dict(),
            "described": self.described,
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "scaler": self.scaler.state_dict(),
        }


def _zero(outputs: Sequence[torch.Tensor], labels: object, weights: object) -> torch.Tensor:
    return torch.stack([(output * 0).sum() for output in outputs]).sum()


def _named(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [(name, param) for name, param in model.named_parameters() if id(param) in trained]


def _on_rank_0(total: torch.Tensor) -> torch.Tensor:
    """Return a sum over ranks as rank 0's, and zeros elsewhere, so that all together have it once."""
    return total if hvd.rank() == 0 else torch.zeros_like(total)


def _finite(params: list[torch.nn.Parameter]) -> bool:
    return bool(torch.isfinite(torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])))
