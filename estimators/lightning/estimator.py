"""LightningEstimator: trains a ``LightningModule`` on a DataFrame."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch

from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.fit.estimator import SparkEstimator, model_fields
from spark_hvd.estimators.fit.plan import FitPlan, Settings
from spark_hvd.estimators.lightning.loop import LightningFramework
from spark_hvd.estimators.lightning.parts import package_of
from spark_hvd.estimators.lightning.tables import GONE, LIGHTNING
from spark_hvd.estimators.lightning.trial import check_trainer_args, try_lightning
from spark_hvd.estimators.torch.learning_rate import optimizer_facts
from spark_hvd.estimators.torch.model import TorchModel
from spark_hvd.estimators.torch.trial import try_transform
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.inputs import tensors_of
from spark_hvd.estimators.training.spec import TrainSpec

_LOSSES = {
    "multiclass": torch.nn.CrossEntropyLoss,
    "binary": torch.nn.BCEWithLogitsLoss,
    "regression": torch.nn.MSELoss,
}
"""The loss that stands for each task: dtypes of labels and columns of predictions follow from it."""


class LightningModel(TorchModel):
    """A trained LightningModule in Spark ML; see TorchModel. Its ``forward`` gets the features, one argument each."""

    __module__ = "spark_hvd.estimators"


class LightningEstimator(SparkEstimator[LightningModel]):
    """Trains a ``LightningModule`` on the rows of a DataFrame, on several ranks, and gives a LightningModel.

    An ``Estimator`` of Spark ML as TorchEstimator is, with the same data, store, checkpoints and history; each rank
    runs a Trainer of Lightning. Steps get a dict of column name -> tensor (rows, ...) on the rank's device::

        class Net(L.LightningModule):
            def training_step(self, batch, batch_idx):
                loss = cross_entropy(self(batch["features"]), batch["label"])
                self.log("train_loss", loss)
                return loss

    What is logged is in the history, as ``loss`` what training_step returns. Before ranks are started one batch is
    tried on the driver, on a copy of the module. The module may be of ``lightning`` or of ``pytorch_lightning``.

    Raises:
        TypeError, ValueError: a parameter is unknown or its value is not allowed.
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
                    f"is no {pl.__name__}.Callback, which a module of {pl.__name__} needs"
                )
        check_trainer_args(pl, settings["trainer_args"])
        if settings["validation"] and type(module).validation_step is pl.LightningModule.validation_step:
            raise ValueError(
                f"validation={settings['validation']!r}: {type(module).__name__} has no validation_step(batch, "
                "batch_idx), which is what validates"
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
        except Exception:  # it asks a Trainer that is not there
            return {}
        several = found[0] if isinstance(found, tuple) and isinstance(found[0], list) else found
        several = several if isinstance(several, list | tuple) else [several]
        made = [each["optimizer"] if isinstance(each, dict) else each for each in several]
        return optimizer_facts([each for each in made if isinstance(each, torch.optim.Optimizer)])

    def _model(self, plan: FitPlan, spec: TrainSpec, state: Mapping[str, Any], history: History) -> LightningModel:
        module = copy.deepcopy(plan.objects.model)
        module.load_state_dict(state["model"])
        return LightningModel(**model_fields(plan, spec, module, history))
