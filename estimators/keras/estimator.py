"""KerasEstimator and KerasModel: train a Keras model on a DataFrame, on the backend with which Keras was imported."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from spark_hvd.data.readers.dataset import Column, listed
from spark_hvd.data.readers.reader import Batch
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.fit.estimator import SparkEstimator, model_fields
from spark_hvd.estimators.fit.plan import FitPlan, Settings
from spark_hvd.estimators.fit.trial import check_loss, describe, failed
from spark_hvd.estimators.keras.loop import KerasFramework
from spark_hvd.estimators.keras.measure import batch_of, compiled, output_names
from spark_hvd.estimators.keras.module import Described
from spark_hvd.estimators.keras.tables import GONE, KERAS, MODEL
from spark_hvd.estimators.params.params import TableParams
from spark_hvd.estimators.torch.mlflow import pinned, with_metrics
from spark_hvd.estimators.torch.model import TorchModel
from spark_hvd.estimators.torch.trial import try_transform
from spark_hvd.estimators.training.head import Head
from spark_hvd.estimators.training.history import History
from spark_hvd.estimators.training.inputs import argument_names, tensors_of
from spark_hvd.estimators.training.spec import TrainSpec
from spark_hvd.runner.config import PRELOAD

_log = logging.getLogger(__name__)
_DESCRIBED = frozenset({"loss", "metrics", "optimizer"})
_REGRESSION = (
    "mean_squared_error mean_absolute_error mean_squared_logarithmic_error mean_absolute_percentage_error log_cosh "
    "huber poisson mse mae msle mape"  # the user's functions may have the short names, too
)
_HEADS = {
    **dict.fromkeys(_REGRESSION.split(), "regression"),
    "binary_crossentropy": "binary",
    "categorical_crossentropy": "multiclass",
    "sparse_categorical_crossentropy": "multiclass",
}


class _KerasParams(TableParams):
    """A table of parameters with a Keras model and its custom objects."""

    def value_of(self, name: str) -> Any:
        """See base class; the model gets its custom objects."""
        value = super().value_of(name)
        if name == "model" and value is not None:
            value.custom_objects = {**value.custom_objects, **(self.getOrDefault("custom_objects") or {})}
        return value

    def getModel(self) -> Any:  # noqa: N802 - as the others are called
        """Return ``model``: the keras.Model."""
        module = self.value_of("model")
        return None if module is None else module.keras_model


class KerasModel(_KerasParams, TorchModel):
    """A trained Keras model in Spark ML; see TorchModel. It runs on the backend on which it was trained."""

    __module__ = "spark_hvd.estimators"

    _table = MODEL

    def log_to_mlflow(
        self, df: Any = None, name: str = "model", *, registered_model_name: str | None = None, **options: Any
    ) -> Any:
        """Log the model to the active MLflow run, or to a new one; ``mlflow.keras.load_model`` returns the keras.Model.

        The metrics of the epoch whose weights the model has are linked to it.

        Args:
            df: Not used, because Keras models in MLflow take arrays. They have a signature only if you pass one.
            name: Name of the model in the run.
            registered_model_name: Register it under this name, as a new version.
            options: Further arguments of ``mlflow.keras.log_model``, such as ``signature``, ``pip_requirements`` or
                ``metadata``.

        Returns:
            MLflow's ``ModelInfo``.

        Raises:
            ImportError: MLflow is not installed.
        """
        try:
            import mlflow.keras as of_keras
        except ImportError as error:
            raise ImportError("log_to_mlflow needs MLflow on the driver: pip install mlflow-skinny") from error
        model, backend = self.getModel(), self.value_of("model").backend
        if not {"pip_requirements", "conda_env"} & options.keys():  # otherwise MLflow would load the model to find them
            options["pip_requirements"] = [*pinned(("keras", backend)), *options.pop("extra_pip_requirements", ())]
        options |= {"name": name, "registered_model_name": registered_model_name}
        return with_metrics(lambda: of_keras.log_model(model, **options), self._row())

    def _takes_text(self) -> bool:
        return _backend_takes_text()

    def _head(self) -> Head:
        meta = self.value_of("metadata")
        return meta.head if meta is not None else Head("other")

    def _heads(self, outputs: int) -> tuple[Head, ...]:
        made_by_hand = self.value_of("metadata") is None  # then there is no loss
        return (Head("other"),) * outputs if made_by_hand else super()._heads(outputs)


class KerasEstimator(_KerasParams, SparkEstimator[KerasModel]):
    """Trains a ``keras.Model`` on the rows of a DataFrame, on several ranks. ``fit`` returns a KerasModel.

    Data, store, checkpoints and history work as in TorchEstimator. It uses the backend of Keras 3 in the driver: torch
    or TensorFlow (``KERAS_BACKEND``). The model gets its inputs in the order of ``feature_cols``. Before ranks start,
    the driver tries one batch on a copy of the model.

    Raises:
        TypeError, ValueError: A parameter is unknown or its value is not allowed.
    """

    __module__ = "spark_hvd.estimators"

    _table = KERAS
    _gone = GONE
    _framework = KerasFramework()
    _required: ClassVar[Mapping[str, str]] = {
        **SparkEstimator._required,
        "optimizer": "an optimizer of Keras, or its name",
        "loss": "a loss of Keras, its name, or a function of (label, output)",
    }

    def _before_saving(self, objects: dict[str, Any]) -> dict[str, Any]:
        # Pickles of Keras lack what its configurations lack: Huber's delta, what has no weight decay.
        return objects | {name: Described.of(objects[name]) for name in _DESCRIBED & objects.keys()}

    @classmethod
    def _after_loading(cls, objects: dict[str, Any]) -> dict[str, Any]:
        custom = objects.get("custom_objects") or {}
        return objects | {name: Described.made(objects[name], custom) for name in _DESCRIBED & objects.keys()}

    def _check(self, settings: Settings) -> None:
        from spark_hvd.keras.backend import require_backend

        require_backend()
        from keras.callbacks import BackupAndRestore

        _check_late(settings)
        if any(isinstance(each, BackupAndRestore) for each in settings["callbacks"]):
            raise ValueError(
                "callbacks: BackupAndRestore loads weights of an earlier fit on the hosts that have its files, and all "
                "epochs would be trained again. Omit it: the estimator resumes with run_id= or max_restarts="
            )
        if settings["scale_lr"] and not hasattr(_optimizer(settings).learning_rate, "assign"):
            raise ValueError(
                "scale_lr=True: the optimizer has a learning rate schedule, which cannot be scaled. Create it for "
                "num_proc ranks and pass scale_lr=False"
            )

    def _derived(self, settings: Settings) -> dict[str, Any]:
        import keras

        settings["model"].environment = settings["backend_env"]
        derived: dict[str, Any] = {
            "optimizer": Described.of(_optimizer(settings)),
            "loss": [(Described.of(settings["loss"]), settings["loss_weights"])],
            "loss_weights": None,
            "metrics": Described.of(settings["metrics"]),
            "text": _text(settings),
        }
        if keras.config.backend() == "torch" and not settings["backend_env"]:  # it applies before Keras is imported
            derived["env"] = {PRELOAD: "spark_hvd.estimators.keras.on_torch"}
        if (checkpoint := settings["checkpoint_callback"]) is not None:
            if settings["monitor"] not in (None, checkpoint.monitor):
                raise ValueError(
                    f"monitor={settings['monitor']!r} and a checkpoint_callback with monitor={checkpoint.monitor!r}: "
                    "use the same monitor, or only one of them"
                )
            best = any(word in checkpoint.monitor for word in ("acc", "auc", "fmeasure", "f1"))
            mode = {"auto": "max" if best else "min"}.get(checkpoint.mode, checkpoint.mode)
            derived |= {"monitor": checkpoint.monitor, "monitor_mode": mode}
            derived["restore_best_weights"] = checkpoint.save_best_only or settings["restore_best_weights"]
        return derived

    def _tried(self, plan: FitPlan, batch: Batch, columns: tuple[Column, ...]) -> TrainSpec:
        if plan.settings["input_shapes"] is None:
            plan = replace(plan, settings={**plan.settings, "input_shapes": _shapes_taken(plan, batch)})
        return super()._tried(plan, batch, columns)

    def _try(self, plan: FitPlan, spec: TrainSpec, batch: Batch) -> TrainSpec:
        import keras

        wrong = {"sum", "mean_with_sample_weight"} if spec.sample_weight_col else {"sum"}
        for loss in keras.tree.flatten(self.value_of("loss")):
            if (reduction := getattr(loss, "reduction", None)) in wrong and plan.backend.num_processes() > 1:
                raise ModelError(
                    f"{loss.name} has reduction={reduction!r}, but several ranks compute the mean over all rows: "
                    "expected 'sum_over_batch_size', with a matching learning rate, or num_proc=1"
                )
        module: Any = copy.deepcopy(plan.objects.model)
        objects = replace(plan.objects, model=module, callbacks=())
        given = [
            f"{name}: {describe(tensor)}"
            for specs in (spec.inputs, spec.labels)
            for name, tensor in zip(argument_names(specs), tensors_of(specs, batch), strict=True)
        ]
        taken = getattr(module.keras_model, "inputs", None)
        if taken is not None and len(taken) != len(tensors_of(spec.inputs, batch)):
            raise ModelError(
                f"the model takes {len(taken)} inputs, but got feature_cols={plan.settings['feature_cols']!r}: "
                "expected one column for each, or stack_features=True for a single input"
            )
        declared, labels_of = getattr(module.keras_model, "_outputs_struct", None), plan.settings["label_cols"]
        if isinstance(declared, Mapping) and list(declared) != sorted(declared) and set(declared) != set(labels_of):
            _log.warning(
                "the outputs of the model are a dict, which Keras sorts by name: label_cols %s are compared with %s, "
                "in this order",
                listed(labels_of),
                listed(sorted(declared)),
            )
        inputs, labels, weights = batch_of(spec, batch, module.keras_model)
        try:
            optimizer = Described.made(objects.optimizer, module.custom_objects)
            model = compiled(spec, objects, optimizer)
            logs = model.train_on_batch(inputs, labels, weights, return_dict=True)
        except Exception as error:
            raise failed("a step of training", error, given) from error
        _check_numbers(logs)
        check_loss(spec, float(logs.get("loss", 0.0)), batch)
        try_transform(self._untrained(plan, spec), tensors_of(spec.inputs, batch), needed=True)
        return spec

    def _optimizer_facts(self, plan: FitPlan) -> dict[str, Any]:
        config = plan.objects.optimizer.config["config"]
        config = config.get("inner_optimizer", {}).get("config", config)  # for a LossScaleOptimizer
        return {f"opt_{name}": value for name, value in config.items()}

    def _model(self, plan: FitPlan, spec: TrainSpec, state: Mapping[str, Any], history: History) -> KerasModel:
        module = copy.deepcopy(plan.objects.model)
        module.load_state_dict(state["model"])
        fields = model_fields(plan, spec, module, state, history)
        loss, outputs = self.value_of("loss"), output_names(module.keras_model)
        fields["metadata"] = replace(fields["metadata"], head=_head_of(loss), heads=_heads_of(loss, outputs))
        return KerasModel(**fields, custom_objects=plan.settings["custom_objects"])


def _check_numbers(logs: Mapping[str, Any]) -> None:
    """Raise a ModelError for a metric with several values, such as one for each class."""
    for name, value in logs.items():
        if math.prod(shape := tuple(getattr(value, "shape", ()))) != 1:
            raise ModelError(
                f"metric {name!r} has a value of shape {shape}, but the history holds numbers: expected a metric with "
                "one, such as F1Score(average='macro'), or one metric for each class"
            )


def _shapes_taken(plan: FitPlan, batch: Batch) -> list[list[int] | None] | None:
    """Return, for each column, the shape that the model's input declares, if it has as many elements as a row."""
    names, inputs = plan.settings["feature_cols"], getattr(plan.objects.model.keras_model, "inputs", None) or []
    if plan.settings["stack_features"] or len(inputs) != len(names) or not set(names) <= batch.keys():
        return None
    shapes: list[list[int] | None] = []
    for name, taken in zip(names, inputs, strict=True):
        wanted, actual = tuple(taken.shape[1:]), tuple(batch[name].shape[1:])
        fits = wanted != actual and None not in wanted and math.prod(wanted) == math.prod(actual)
        shapes.append([-1, *wanted] if fits else None)
    return shapes


def _check_late(settings: Settings) -> None:
    """Refuse Keras callbacks that would keep the current weights for a value of an earlier epoch."""
    for each in settings["callbacks"] if settings["validation_in_background"] else ():
        for keeps in ("restore_best_weights", "save_best_only"):
            if getattr(each, keeps, False) and str(getattr(each, "monitor", "")).startswith("val_"):
                raise ValueError(
                    f"callbacks: {type(each).__name__}({keeps}=True) with validation_in_background: {each.monitor} "
                    f"arrives when the model has the weights of a later epoch, which it would keep. Omit {keeps}. "
                    "Pass the estimator restore_best_weights=True, which returns the weights of the best epoch"
                )


def _text(settings: Settings) -> tuple[str, ...]:
    """Return the columns that may be text. Labels must be numbers, because losses compare them."""
    takes = _backend_takes_text() and settings["reader"] != "petastorm"
    return tuple(name for name in settings["feature_cols"] if takes and name not in settings["label_cols"])


def _backend_takes_text() -> bool:
    import keras

    return bool(keras.config.backend() == "tensorflow")  # torch has no string tensors


def _optimizer(settings: Settings) -> Any:
    """Return the optimizer; for a half-precision model wrapped to scale the loss, as Keras' compile does."""
    import keras

    found = keras.optimizers.get(settings["optimizer"])
    layers = settings["model"].keras_model._flatten_layers()
    half = any(each.dtype_policy.name == "mixed_float16" for each in layers)
    return keras.optimizers.LossScaleOptimizer(found) if half and not hasattr(found, "inner_optimizer") else found


def _head_of(loss: Any) -> Head:
    """Return the head of a single output, derived from its loss."""
    if isinstance(loss, list | tuple | Mapping):
        found = list(loss.values()) if isinstance(loss, Mapping) else list(loss)
        return _head_of(found[0]) if len(found) == 1 else Head("other")
    if isinstance(loss, str):
        import keras

        with suppress(ValueError):  # the name of one of the user's losses
            loss = keras.losses.get(loss)
    config = loss.get_config() if hasattr(loss, "get_config") else {}
    names = [loss if isinstance(loss, str) else getattr(loss, "__name__", ""), config.get("name")]
    names += [kind.__name__ for kind in type(loss).__mro__]
    kind = next((_HEADS[name] for name in map(_snake, map(str, names)) if name in _HEADS), "other")
    scores = "logits" if config.get("from_logits") else "probabilities"
    return Head(kind, scores if kind in ("binary", "multiclass") else "")


def _heads_of(loss: Any, outputs: Sequence[str]) -> tuple[Head, ...]:
    """Return the heads of several ``outputs``; empty if there is one loss for all."""
    if isinstance(loss, Mapping):
        names = outputs if set(loss) <= set(outputs) else list(loss)
        return tuple(_head_of(loss[name]) if name in loss else Head("other") for name in names)
    return tuple(map(_head_of, loss)) if isinstance(loss, list | tuple) else ()


def _snake(name: str) -> str:
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name).lstrip("_")
