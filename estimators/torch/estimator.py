"""TorchEstimator: trains a ``torch.nn.Module`` on a DataFrame."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.fit.estimator import SparkEstimator, model_fields
from spark_hvd.estimators.fit.plan import FitPlan, Settings
from spark_hvd.estimators.params.tables import GONE, TORCH
from spark_hvd.estimators.torch.learning_rate import make_optimizer, optimizer_facts, scale
from spark_hvd.estimators.torch.loop import TorchFramework
from spark_hvd.estimators.torch.model import TorchModel
from spark_hvd.estimators.torch.trial import try_batch, try_transform
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.inputs import tensors_of
from spark_hvd.estimators.training.spec import TrainSpec


class TorchEstimator(SparkEstimator[TorchModel]):
    """Trains a ``torch.nn.Module`` on the rows of a DataFrame, on several ranks. ``fit`` returns a TorchModel.

    This Spark ML ``Estimator`` works in Pipelines, CrossValidator and TrainValidationSplit. ``fit(df)`` sends the rows
    straight to the ranks, or with ``store=`` writes them as Parquet first. Each rank reads its share, gradients are
    averaged, and rank 0 writes a checkpoint after every epoch. Each parameter is a keyword and a Spark ML ``Param``,
    and has a getter and a setter.

    Raises:
        TypeError, ValueError: A parameter is unknown or its value is not allowed.
    """

    __module__ = "spark_hvd.estimators"

    _table = TORCH
    _gone = GONE
    _framework = TorchFramework()
    _required: ClassVar[Mapping[str, str]] = {
        **SparkEstimator._required,
        "optimizer": "a torch optimizer of model.parameters(), or a function of them such as "
        "lambda params: torch.optim.SGD(params, lr=0.1)",
    }

    def _imports(self, settings: Settings) -> list[str]:
        return [*super()._imports(settings), type(self._framework).__module__]

    def _check(self, settings: Settings) -> None:
        losses = [name for name in ("loss", "loss_constructors") if settings[name]]
        if len(losses) == 2:
            raise ValueError("loss and loss_constructors are both given: pass only one of them")
        if not losses and settings["train_minibatch_fn"] is None:
            raise ValueError("loss is missing: pass a function of (output, label), such as torch.nn.MSELoss()")
        if settings["train_minibatch_fn"] is not None:
            idle = ("precision", "gradient_clip_norm", "gradient_clip_value")
            # validation supports bf16
            if odd := [name for name in idle if settings[name] not in (None, "32", "bf16")]:
                raise ValueError(
                    f"{odd[0]}={settings[odd[0]]!r} has no effect with train_minibatch_fn, which does forward, "
                    f"backward and step: do this there (torch.autocast, optimizer.synchronize() before clipping), and "
                    f"omit {odd[0]}"
                )
        if not losses and settings["validation"]:
            raise ValueError("loss is missing: validation needs it, even if train_minibatch_fn has a loss of its own")

    def _try(self, plan: FitPlan, spec: TrainSpec, batch: Batch) -> TrainSpec:
        spec = try_batch(spec, plan.objects, batch)
        try_transform(
            self._untrained(plan, spec), tensors_of(spec.inputs, batch), needed=plan.objects.train_minibatch_fn is None
        )
        return spec

    def _optimizer_facts(self, plan: FitPlan) -> dict[str, Any]:
        return optimizer_facts([make_optimizer(plan.objects.optimizer, plan.objects.model)])

    def _model(self, plan: FitPlan, spec: TrainSpec, state: Mapping[str, Any], history: History) -> TorchModel:
        trained = copy.deepcopy(plan.objects)
        trained.model.load_state_dict(state["model"])
        optimizer = make_optimizer(trained.optimizer, trained.model)
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
            if spec.scale_lr:
                scale(optimizer, None, 1.0 / state["size"])
        return TorchModel(
            **model_fields(plan, spec, trained.model, state, history),
            optimizer=optimizer,
            loss=plan.settings["loss"],
            loss_constructors=plan.settings["loss_constructors"],
        )
