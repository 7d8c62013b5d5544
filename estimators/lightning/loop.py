"""The training of LightningEstimator: Lightning's Trainer in each rank, with our data, checkpoints and history."""

from __future__ import annotations

import os
import shutil
import signal
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch

import spark_hvd.torch as hvd
from spark_hvd.estimators.errors import EstimatorError
from spark_hvd.estimators.lightning import epoch, parts
from spark_hvd.estimators.torch.learning_rate import check_described, described, options_of
from spark_hvd.estimators.torch.objective import Sums
from spark_hvd.estimators.training.checkpoint import Checkpoints
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.train import NAN_CHECK_EVERY, Framework, Job, not_finite, speed
from spark_hvd.scratch import Scratch
from spark_hvd.store.errors import explaining
from spark_hvd.store.paths import local_below

_FOLDERS = ("dirpath", "_root_dir", "_save_dir")
"""Attributes in which ModelCheckpoint, profilers and loggers keep their folder; those of loggers are private."""


class RunFiles:
    """The files of a run; if it is ``resumed``, the store already has some."""

    def __init__(self, of: Checkpoints, resumed: bool) -> None:
        self._store, self._logs, self._check_owner = of.store, of.store.logs_path(of.run_id), of.check_owner
        self._copied: dict[str, tuple[int, int]] = {}
        self._folder = Scratch("lightning") if hvd.rank() == 0 else None
        self.root = hvd.broadcast_object(self._folder.path if self._folder else "", 0, name="spark_hvd.lightning.root")
        if resumed and hvd.rank() == 0:
            try:
                self._fetch()
            except BaseException:
                self.close()
                raise

    def inside(self, path: str, driver_folder: str) -> str:
        """Return where files that should go to ``path`` go: into the folder, unless the path says otherwise.

        Only paths within ``driver_folder``, where loggers make paths absolute, were not meant to be elsewhere.
        """
        if "://" in path:
            return path
        name = os.path.relpath(path, driver_folder) if os.path.isabs(path) and driver_folder != "/" else path
        return path if os.path.isabs(name) or name.startswith("..") else os.path.normpath(os.path.join(self.root, name))

    def redirect(self, writer: Any, driver_folder: str) -> None:
        """Make a callback, logger or profiler write into the folder."""
        for name in _FOLDERS:
            value = vars(writer).get(name)
            if isinstance(value, (str, os.PathLike)):
                setattr(writer, name, self.inside(os.fspath(value), driver_folder))
            elif name == "dirpath" and hasattr(writer, "save_top_k"):
                # Not below a logger's folder, whose name changes when the run is resumed.
                setattr(writer, name, os.path.join(self.root, "checkpoints"))
        uri = vars(writer).get("_tracking_uri")  # set in MLFlowLogger
        if isinstance(uri, str) and uri.startswith("file:") and not uri.startswith("file:/"):
            writer._tracking_uri = f"file:{self.inside(uri.removeprefix('file:'), driver_folder)}"

    def copy(self) -> None:
        """Update the store, on rank 0, unless another fit owns the run; files deleted here are deleted there."""
        if hvd.rank() != 0:
            return
        self._check_owner()
        found = self._found()
        for name, state in found.items():
            if self._copied.get(name) != state:
                with open(os.path.join(self.root, name), "rb") as source, self._store.writing(self._path(name)) as to:
                    shutil.copyfileobj(source, to, 1 << 20)
        for name in self._copied.keys() - found.keys():
            self._store.delete(self._path(name))
        self._copied = found

    def close(self) -> None:
        """Delete the folder."""
        if self._folder is not None:
            self._folder.close()

    def _fetch(self) -> None:
        """Fetch the files of earlier epochs: a ModelCheckpoint deletes those that are no longer among the best."""
        inner = self._store.inner_path(self._logs).rstrip("/")
        if not self._store.exists(self._logs):
            return
        with explaining("list", self._logs):
            names = [path[len(inner) + 1 :] for path in self._store.filesystem.find(inner)]
        names = [name for name in names if name and not name.endswith("/")]  # folders, as S3's console creates them
        # check all of them before writing the first
        for name, local in [(name, local_below(self.root, name, self._logs)) for name in names]:
            with explaining("read", self._path(name)):
                os.makedirs(os.path.dirname(local), exist_ok=True)
                with self._store.open(self._path(name)) as source, open(local, "wb") as to:
                    shutil.copyfileobj(source, to, 1 << 20)
        self._copied = self._found()

    def _found(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                state = os.stat(path)
                found[os.path.relpath(path, self.root)] = (state.st_mtime_ns, state.st_size)
        return found

    def _path(self, name: str) -> str:
        return f"{self._logs}/{name.replace(os.sep, '/')}"


class LightningFramework(Framework):
    """Trains a LightningModule."""

    def fit(self, job: Job) -> History:
        if job.stopped:
            return job.history
        parts.be_quiet()
        files = RunFiles(job.checkpoints, resumed=job.resumed is not None)
        try:
            return _Fit(job, files).run()
        finally:
            files.close()


class _Fit:
    def __init__(self, job: Job, files: RunFiles) -> None:
        self.job, self.files, self.asked = job, files, job.spec.trainer
        self.module = job.objects.model
        self.pl = parts.package_of(self.module)
        self.checkpoint_io = parts.make_checkpoint_io(self.pl, self._resumed())
        self.loader, self.batch = epoch.TrainLoader(job, self.save_within), 0
        self.trainer = self.loader.trainer = self._trainer()
        self.on_sigterm = signal.getsignal(signal.SIGTERM)
        self.sums, self.rows, self.validated = Sums([], job.device), 0, 0
        self.began, self.validating, self.rate, self.due = 0.0, 0.0, 0.0, 0
        self.logged: list[epoch.Logged] = []
        self.before: dict[str, Any] = {}
        self.shared: dict[str, torch.Tensor] = {}
        self.step_monitors: set[str] = set()
        job.awaits_validation = job.validation is not None

    def run(self) -> History:
        job = self.job
        validation = parts.ValidationLoader(job) if job.validation is not None else None
        with warnings.catch_warnings():
            # A module may have a validation_step but be trained without validation data.
            warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no")
            # Lightning raises this itself with newer versions of torch.
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
            warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(")  # ours are of all ranks
            # On by default with manual optimization, as one batch is not enough to tell.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified in DDP")
            self.trainer.fit(
                self.module, self.loader, validation, ckpt_path=parts.KEEP if job.resumed is not None else None
            )
        self.files.copy()
        if not job.history:
            raise EstimatorError(f"no epoch was trained: trainer_args={self.asked['args']!r} left nothing to do")
        job.finish(self.module.state_dict())
        return job.history

    # -- the Trainer

    def _trainer(self) -> Any:
        spec, device, pl = self.job.spec, self.job.device, self.pl
        folder, callbacks = self.asked["folder"], list(self.job.objects.callbacks)
        loggers = self.asked["logger"]
        if loggers is None:
            loggers = [pl.loggers.CSVLogger(self.files.root, name="")]
        for writer in (*callbacks, *(loggers if isinstance(loggers, list) else ())):
            self.files.redirect(writer, folder)
        unused = self.asked["find_unused_parameters"]
        if unused is None:  # optimizers that take turns each skip the others' parameters
            unused = not self.module.automatic_optimization
        return pl.Trainer(
            **{"num_sanity_val_steps": 0, "enable_model_summary": False, **self.asked["args"]},
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=[device.index] if device.type == "cuda" else 1,
            strategy=parts.make_strategy(pl, device, self.checkpoint_io, unused, self._factor),
            use_distributed_sampler=False,
            max_epochs=spec.epochs,
            callbacks=[_first(self), *callbacks, _last(self)],
            logger=loggers,
            log_every_n_steps=min(self.asked["log_every_n_steps"], self.job.steps),
            profiler=self._profiler(),
            enable_progress_bar=spec.verbose > 1,
            default_root_dir=self.files.root,
        )

    def _factor(self) -> float:
        """Return the factor for the loss of this batch: by its rows, and by the batches that form the next step.

        Lightning divides by the usual number of batches, but the last step of an epoch may consist of fewer.
        """
        passes, weight = self.trainer.accumulate_grad_batches, self.loader.weights[self.batch]
        if passes == 1 or not self.module.automatic_optimization:
            return weight
        batches = int(min(self.trainer.num_training_batches, len(self.loader)))
        return float(weight * passes / min(passes, batches - self.batch // passes * passes))

    def _profiler(self) -> Any:
        profiler = self.asked["profiler"]
        if isinstance(profiler, str):  # by default Lightning prints the report, in output that we hide
            profiler = getattr(self.pl.profilers, parts.PROFILERS[profiler])(self.files.root, "profile")
        elif profiler is not None:
            self.files.redirect(profiler, self.asked["folder"])
        return profiler

    def _resumed(self) -> dict[str, Any] | None:
        resumed = self.job.resumed
        if resumed is None:
            return None
        state = parts.from_bytes(resumed["lightning"], self.job.spec.run_id)
        # Files that callbacks remember are now here.
        old, new = resumed["root"], self.files.root
        state["callbacks"] = parts.replaced(state.get("callbacks", {}), lambda text: text.replace(old, new))
        return epoch.not_begun({**state, "state_dict": resumed["model"]})

    # -- what the callbacks call

    def check_resumed(self) -> None:
        """Check that the checkpoint's state belongs to these optimizers and schedulers, before Lightning loads it."""
        job, optimizers = self.job, self.trainer.optimizers
        schedulers = [each.scheduler for each in self.trainer.lr_scheduler_configs]
        options = [group for each in optimizers for group in options_of(each)]
        here = described(self.module, optimizers, schedulers, options)
        self.described = check_described((job.resumed or {}).get("described"), here, job.spec.run_id, job.warns)
        job.begin()

    def start(self) -> None:
        """Prepare for the first epoch."""
        # Lightning must not search for the rest of an epoch, because the loader continues one. With max_steps,
        # the setter of this loop would tell it to.
        self.trainer.fit_loop._restarting = self.trainer.fit_loop.epoch_loop.restarting = False
        if len(self.loader) != self.job.steps:  # the number of ranks has changed
            self.trainer.reload_dataloaders_every_n_epochs = 1  # otherwise the first epoch's length would apply to all
        if hvd.size() > 1 and hvd.rank() == 0:
            self.step_monitors = epoch.step_monitors(self.trainer)
        # Lightning's handler waits for the other ranks, but a rank that is told to end must end at once.
        signal.signal(signal.SIGTERM, self.on_sigterm)

    def start_epoch(self) -> None:
        """Run before all other on_train_epoch_start; by now the previous epoch is complete, including schedulers."""
        if self.trainer.current_epoch > len(self.job.history):
            self.finish_epoch()
        job, begun, optimizers = self.job, self.loader.begun, self.trainer.optimizers
        self.due += len(self.loader) - begun
        job.seed(self.trainer.current_epoch, begun)
        where = {"epoch": self.trainer.current_epoch, "epochs": job.spec.epochs}
        job.progress = hvd.progress(len(self.loader) - begun, **where)
        self.sums, self.rows, self.validated = Sums([], job.device), 0, 0
        self.began, self.validating = time.monotonic(), 0.0
        self.rate = float(optimizers[0].param_groups[0]["lr"]) if optimizers else 0.0
        self.logged, self.before = [], dict(self.trainer.callback_metrics)
        if not begun:
            return
        assert job.partial_epoch is not None
        self.began -= job.partial_epoch["seconds"]
        self.rate = job.partial_epoch["lr"]
        for part in epoch.mine(job.partial_epoch["ranks"]):
            self.rows, self.validated = self.rows + part["rows"], self.validated + part["validated"]
            self.sums.values += self.sums.values.new_tensor(part["sums"])
            self.logged.append(dict(part["logged"]))

    def finish_batch(self, outputs: Any, batch: Mapping[str, torch.Tensor], number: int) -> None:
        """Add training_step's result to the mean loss of the epoch, after a batch."""
        rows = len(next(iter(batch.values())))
        self.rows += rows
        assert self.job.progress is not None
        self.job.progress.step(rows)
        if any(self.logged):
            epoch.log_again(self.trainer, self.logged)
        if self.step_monitors:
            self.step_monitors = epoch.warn_monitor_of_one_rank(self.trainer, self.step_monitors)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, torch.Tensor):
            return
        loss = loss.detach()
        if self.module.automatic_optimization:  # Lightning divides it
            loss = loss * self.trainer.accumulate_grad_batches
        self.job.progress.report(loss=loss.mean())
        look = loss.device.type == "cpu" or number % NAN_CHECK_EVERY == 0
        if look and self.asked["terminate_on_nan"] and not torch.isfinite(loss):
            raise not_finite(self.job.spec, float(loss), self.trainer.current_epoch, number, self.job.steps, batch)
        self.sums.add(rows, loss, ())

    def finish_epoch(self, last: bool = False) -> None:
        """Add the history row of a finished epoch, save files and checkpoint; after the ``last`` no epoch begins."""
        job, trainer = self.job, self.trainer
        seconds = time.monotonic() - self.began - self.validating
        # Lightning keeps values logged in earlier epochs, such as a validation's, even if this epoch had none.
        logged = {name: each for name, each in trainer.callback_metrics.items() if self.before.get(name) is not each}
        mine = (self.rows, self.sums.values.tolist(), epoch.numbers(logged))
        # In one exchange for all of them. Ranks may log values that others do not (rank_zero_only=True).
        rows, sums, metrics = zip(*hvd.allgather_object(mine, name="spark_hvd.epoch"), strict=True)
        rows_with_loss, loss = map(sum, zip(*sums, strict=True))
        means = {"loss": loss / rows_with_loss} if rows_with_loss else {}
        job.awaits_validation &= not self.validated
        job.add(means | epoch.means(metrics, rows), **{"lr": self.rate, **speed(seconds, sum(rows))})
        job.feed.skip(max(0, self.due - job.feed.given))  # the epoch ended early (limit_train_batches)
        job.report()
        if last:
            epoch.warn_unknown_monitor(job)
        self._save(stop=last)

    def save_within(self, done: int) -> None:
        """Save a checkpoint within an epoch, after this many batches."""
        job, trainer = self.job, self.trainer
        if trainer.fit_loop.epoch_loop.batch_progress.current.completed != done:
            return  # training_step takes batches ahead
        if done % trainer.accumulate_grad_batches:
            return  # a callback changed it, and there are gradients
        sums, logged = self.sums.values.tolist(), epoch.logged(trainer)
        part = {"rows": self.rows, "validated": self.validated, "sums": sums, "logged": logged}
        partial = {
            "step": done,
            "seconds": time.monotonic() - self.began - self.validating,
            "lr": self.rate,
            "ranks": hvd.allgather_object(part, name="spark_hvd.partial_epoch"),
        }
        self._save(partial)
        job.seed(trainer.current_epoch, done)

    def _save(self, partial: Mapping[str, Any] | None = None, stop: bool = False) -> None:
        job, trainer = self.job, self.trainer
        buffers = dict(self.module.named_buffers())
        if buffers and job.state is not None:  # so that any rank can continue as the first one
            hvd.broadcast_parameters(buffers, root_rank=0)
        trainer.save_checkpoint(parts.KEEP)
        kept, self.checkpoint_io.kept = self.checkpoint_io.kept, None
        weights = self.module.state_dict()
        if kept is not None and kept["state_dict"].keys() == weights.keys():
            weights = kept["state_dict"]  # the validated weights, if a callback averages weights
        every = job.spec.checkpoint_every
        if partial is None or (every and partial["step"] % every == 0):
            for logger in trainer.loggers:
                logger.save()
            self.files.copy()
        rest = {"root": self.files.root, "described": self.described}
        job.save(weights, lambda: {**rest, "lightning": parts.to_bytes(kept or {})}, partial, stop)


def _first(fit: _Fit) -> Any:
    """Return the callback that runs before the user's."""

    class First(fit.pl.callbacks.Callback):  # type: ignore[misc, name-defined] # Any
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            fit.check_resumed()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            fit.start()

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            fit.start_epoch()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            fit.batch = batch_idx

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            fit.finish_batch(outputs, batch, batch_idx)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            fit.validating -= time.monotonic()

        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            fit.validated += len(next(iter(batch.values())))

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            epoch.share(trainer, fit.shared)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            epoch.share(trainer, fit.shared)  # what the module has logged at the end
            fit.validating += time.monotonic()

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            epoch.share(trainer, fit.shared)

    return First()


def _last(fit: _Fit) -> Any:
    """Return the callback that runs after the user's, so that their last changes (such as averaging) are saved too."""

    class Last(fit.pl.callbacks.Checkpoint):  # type: ignore[misc, name-defined] # Any. Lightning puts these last.
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            epoch.share(trainer, fit.shared)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch > len(fit.job.history):
                fit.finish_epoch(last=True)

    return Last()
