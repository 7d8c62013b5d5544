"""LightningEstimator: trains a ``LightningModule`` on a DataFrame."""

from __future__ import annotations

import copy
import inspect
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spark_hvd.data.readers.batches import STACK
from spark_hvd.data.readers.dataset import listed
from spark_hvd.data.readers.errors import DataError
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.fit.estimator import SparkEstimator, model_fields
from spark_hvd.estimators.fit.plan import FitPlan, Settings
from spark_hvd.estimators.fit.trial import check_loss, describe, failed
from spark_hvd.estimators.lightning.loop import LightningFramework
from spark_hvd.estimators.lightning.parts import batch_dict, be_quiet, named_tensors, package_of
from spark_hvd.estimators.lightning.tables import GONE, LIGHTNING
from spark_hvd.estimators.torch.learning_rate import optimizer_facts
from spark_hvd.estimators.torch.model import TorchModel
from spark_hvd.estimators.torch.trial import try_transform
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.inputs import tensors_of
from spark_hvd.estimators.training.spec import Objects, TrainSpec
from spark_hvd.world.words import nearest

_STEPS = 100
"""Batches per epoch that configure_optimizers sees before the data have been counted."""
_PACKAGES = ("lightning", "pytorch_lightning", "torch")
_TRIED = frozenset({"gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly"})
_GLOBAL = frozenset({"benchmark", "deterministic", "precision", "plugins"})
"""Arguments that would change torch in the driver's process, or that need the ranks' devices."""
_LOSSES = {
    "multiclass": torch.nn.CrossEntropyLoss,
    "binary": torch.nn.BCEWithLogitsLoss,
    "regression": torch.nn.MSELoss,
}
"""The loss for each task, which determines dtypes of labels and columns of predictions."""


def check_trainer_args(pl: Any, args: dict[str, Any]) -> None:
    """Reject keywords that the Trainer does not have and values that it does not accept.

    Raises:
        TypeError: There is no such keyword.
        ValueError: Lightning refuses a value.
    """
    known = inspect.signature(pl.Trainer).parameters
    for name in args:
        if name not in known:
            raise TypeError(f"trainer_args: lightning.Trainer has no keyword {name!r}.{nearest(name, known)}")
    try:
        _make_trainer(pl, {name: value for name, value in args.items() if name not in _GLOBAL})
    except Exception as error:
        raise ValueError(f"trainer_args={args!r}: the Trainer does not accept them: {error}") from error


def try_lightning(spec: TrainSpec, objects: Objects, batch: Batch) -> None:
    """Try one batch with training_step, backward, the optimizers and validation_step, on a copy of the module.

    Its hooks run as in training; ``self.trainer`` is a Trainer of one process, and ``self.logger`` logs nothing.

    Raises:
        ModelError: A part failed; the text names it and the shapes and dtypes of its inputs.
    """
    pl = package_of(objects.model)
    module = copy.deepcopy(objects.model)
    try:
        tensors = batch_dict(spec, batch)
    except DataError:
        raise
    except ValueError as error:
        raise ModelError(f"{error}. Change input_shapes or label_shapes") from error
    _check_names(spec, batch)
    given = [f"{name}: {describe(tensor)}" for name, tensor in tensors.items()]
    steps = spec.epoch_steps(1) if spec.train_steps_per_epoch or spec.train.rows else _STEPS
    probe = _probe(pl)
    asked = spec.trainer
    args = {name: value for name, value in asked["args"].items() if name in _TRIED}
    trainer = _make_trainer(pl, args, max_epochs=spec.epochs, callbacks=[probe])
    validation = _RepeatedBatch(tensors, 1) if asked["validate"] else None
    try:
        # Nothing random in the driver's process may depend on whether a fit was tried.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, _RepeatedBatch(tensors, steps), validation)
    except Exception as error:
        raise failed(_where(error, module), error, given) from error
    check_loss(spec, probe.loss, batch)
    unused = probe.unused
    if unused and module.automatic_optimization and not asked["find_unused_parameters"]:
        raise ModelError(
            f"the loss does not depend on {len(unused)} trainable parameters: {listed(unused)}. Freeze "
            "them with requires_grad_(False), or pass find_unused_parameters=True"
        )


def _check_names(spec: TrainSpec, batch: Batch) -> None:
    """Check that a column with several roles has one form in all of them, because a batch has it once.

    Raises:
        ModelError: As a feature, label or weight, a column has different dtypes or shapes.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(spec, batch):
        other = found.setdefault(name, tensor)
        if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            raise ModelError(
                f"column {name!r} is used twice, as {describe(other)} and as {describe(tensor)}, but a batch has one "
                "tensor for each column. Make dtypes and shapes of feature, label and weight equal, or select the "
                "column again under another name"
            )


class _RepeatedBatch:
    """One batch, repeated."""

    def __init__(self, batch: Batch, steps: int) -> None:
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._steps):
            yield dict(self._batch)


def _make_trainer(pl: Any, args: dict[str, Any], **more: Any) -> Any:
    be_quiet()
    return pl.Trainer(
        **{"num_sanity_val_steps": 0, "enable_model_summary": False, **args},
        accelerator="cpu",
        devices=1,
        plugins=[pl.plugins.environments.LightningEnvironment()],  # not SLURM's, even if the driver is a SLURM job
        logger=pl.loggers.logger.DummyLogger(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        **more,
    )


def _probe(pl: Any) -> Any:
    class OneBatch(pl.callbacks.Callback):  # type: ignore[misc] # Any
        """Ends the training after one batch, and records its loss and which parameters got no gradient."""

        unused: tuple[str, ...] = ()
        loss = 0.0

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            named = pl_module.named_parameters()
            self.unused = tuple(name for name, param in named if param.requires_grad and param.grad is None)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            self.loss = float(loss) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else 0.0
            trainer.should_stop = True

    return OneBatch()


def _where(error: BaseException, module: torch.nn.Module) -> str:
    """Return the step or hook of the module in which an error was raised."""
    methods = [
        frame.f_code.co_name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_locals.get("self") is module and frame.f_globals.get("__name__", "").split(".")[0] not in _PACKAGES
    ]
    return f"{type(module).__name__}.{methods[0]}" if methods else type(module).__name__


class LightningModel(TorchModel):
    """A trained LightningModule in Spark ML; see TorchModel. Its ``forward`` gets one argument for each feature."""

    __module__ = "spark_hvd.estimators"


class LightningEstimator(SparkEstimator[LightningModel]):
    """Trains a ``LightningModule`` on the rows of a DataFrame, on several ranks. ``fit`` returns a LightningModel.

    Data, store, checkpoints and history work as in TorchEstimator. Each rank runs a Trainer of Lightning. Steps get a
    dict of column name -> tensor (rows, ...) on the rank's device::

        class Net(L.LightningModule):
            def training_step(self, batch, batch_idx):
                loss = cross_entropy(self(batch["features"]), batch["label"])
                self.log("train_loss", loss)
                return loss

    The history has the logged values, and the result of training_step as ``loss``. Before ranks start, the driver tries
    one batch on a copy of the module. The module may be from ``lightning`` or ``pytorch_lightning``.

    Raises:
        TypeError, ValueError: A parameter is unknown or its value is not allowed.
    """

    __module__ = "spark_hvd.estimators"

    _table = LIGHTNING
    _gone = GONE
    _framework = LightningFramework()

    def _imports(self, settings: Settings) -> list[str]:
        return [*super()._imports(settings), package_of(settings["model"]).__name__, type(self._framework).__module__]

    def _check(self, settings: Settings) -> None:
        module = settings["model"]
        pl = package_of(module)
        for callback in settings["callbacks"]:
            if not isinstance(callback, pl.Callback):
                raise TypeError(
                    f"callbacks={settings['callbacks']!r}: {type(callback).__module__}.{type(callback).__qualname__} "
                    f"is not a {pl.__name__}.Callback, which a module of {pl.__name__} needs"
                )
        check_trainer_args(pl, settings["trainer_args"])
        if settings["stack_features"] and STACK in {*settings["label_cols"], settings["sample_weight_col"]}:
            raise ValueError(
                f"stack_features=True: a batch has the stacked features as {STACK!r}, which is also the name of a "
                "label or of sample_weight_col. Rename that column, or omit stack_features"
            )
        if settings["validation"] and type(module).validation_step is pl.LightningModule.validation_step:
            raise ValueError(
                f"validation={settings['validation']!r}: {type(module).__name__} has no validation_step(batch, "
                "batch_idx), which validation needs"
            )

    def _try(self, plan: FitPlan, spec: TrainSpec, batch: Batch) -> TrainSpec:
        try_lightning(spec, plan.objects, batch)
        try_transform(self._untrained(plan, spec), tensors_of(spec.inputs, batch), needed=False)
        return spec

    def _derived(self, settings: Settings) -> dict[str, Any]:
        names = ("logger", "log_every_n_steps", "profiler", "terminate_on_nan", "find_unused_parameters")
        return {
            "loss": [_LOSSES[settings["task"]]()] if settings["task"] else [],
            "trainer": {
                **{name: settings[name] for name in names},
                "args": settings["trainer_args"],
                "validate": bool(settings["validation"]),
                "folder": os.getcwd(),
            },
        }

    def _optimizer_facts(self, plan: FitPlan) -> dict[str, Any]:
        try:
            module: Any = copy.deepcopy(plan.objects.model)
            found = module.configure_optimizers()
        except Exception:  # it needs a Trainer that does not exist here
            return {}
        several = found[0] if isinstance(found, tuple) and isinstance(found[0], list) else found
        several = several if isinstance(several, list | tuple) else [several]
        made = [each["optimizer"] if isinstance(each, dict) else each for each in several]
        return optimizer_facts([each for each in made if isinstance(each, torch.optim.Optimizer)])

    def _model(self, plan: FitPlan, spec: TrainSpec, state: Mapping[str, Any], history: History) -> LightningModel:
        module = copy.deepcopy(plan.objects.model)
        module.load_state_dict(state["model"])
        return LightningModel(**model_fields(plan, spec, module, state, history))
