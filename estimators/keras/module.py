"""A Keras model in place of a torch module: called with tensors, stored as named tensors, pickled as ``.keras``.

Nothing here imports Keras before the backend is known, because the first import of Keras fixes it.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from spark_hvd.estimators.errors import ModelError
from spark_hvd.world.pickles import dumps

_FILE = "model.keras"


class KerasModule(torch.nn.Module):
    """A Keras model in the form that our estimators and models use; created from its bytes on first use.

    Attributes:
        backend: Keras' backend, "torch" or "tensorflow".
        custom_objects: Names -> classes and functions that Keras needs to load it.
        environment: Variables to set before Keras is imported.
    """

    _model: Any

    def __init__(self, model: Any = None, data: bytes = b"", backend: str = "") -> None:
        super().__init__()
        # Not as an attribute: on the torch backend it is a module, whose weights would get two names.
        self.__dict__["_model"] = model
        self._data = data
        self.backend = backend or _require_keras("").config.backend()
        self.custom_objects: Mapping[str, Any] = {}
        self.environment: Mapping[str, str | None] = {}

    @property
    def keras_model(self) -> Any:
        """The model itself."""
        if self._model is None:
            keras = _require_keras(self.backend, self.environment)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, _FILE)
                path.write_bytes(self._data)
                # A pickle of ours contains code, so it is trusted anyway, and with it its Lambda layers.
                self.__dict__["_model"] = keras.saving.load_model(
                    path, custom_objects=dict(self.custom_objects), compile=False, safe_mode=False
                )
            self._data = b""
        return self._model

    def _variables(self) -> dict[str, torch.Tensor]:
        import spark_hvd.keras.backend as ours

        return {ours.name_of(place, each): ours.tensor_of(each) for place, each in enumerate(self.keras_model.weights)}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights, by their positions and names."""
        return dict(self._variables())

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Copy these weights into the model."""
        import spark_hvd.keras.backend as ours

        for place, each in enumerate(self.keras_model.weights):
            ours.assign(each, state_dict[ours.name_of(place, each)])

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of inference, as torch tensors, whatever Keras computes with. Inputs may go by name."""
        given = [given_to_keras(each) for each in inputs]
        by_name = {name: given_to_keras(each) for name, each in named.items()}
        return _from_keras(self.keras_model(by_name or (given[0] if len(given) == 1 else given), training=False))

    def __reduce__(self) -> tuple[Any, ...]:
        data = self._data
        if self._model is not None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, _FILE)
                self._model.save(path)
                data = path.read_bytes()
                with zipfile.ZipFile(path) as file:
                    written = file.read("config.json").decode()
            own = _own_objects(written, self._model._flatten_layers())
            self.custom_objects = {**own, **self.custom_objects}
        # As bytes: they may need Keras, which must not be imported before the backend is set.
        return restored, (data, self.backend, dict(self.environment), dumps(dict(self.custom_objects)))


def given_to_keras(tensor: Any) -> Any:
    """Convert a tensor for Keras: numpy arrays work on all backends, without a copy. Other values do not change."""
    import keras

    keeps = keras.config.backend() == "torch" or not isinstance(tensor, torch.Tensor)
    return tensor if keeps else tensor.numpy(force=True)


def _from_keras(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _from_keras(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_from_keras(each) for each in value]
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(value.numpy())


def restored(data: bytes, backend: str, environment: Mapping[str, str | None], custom_objects: bytes) -> KerasModule:
    """Restore a pickled module."""
    _require_keras(backend, environment)
    module = KerasModule(data=data, backend=backend)
    module.environment, module.custom_objects = environment, pickle.loads(custom_objects)
    return module


def _own_objects(written: str, used: Iterable[Any]) -> dict[str, Any]:
    """Return name -> class or function for what another process cannot import, from a script or a notebook.

    Keras saves only names.
    """
    import keras

    named = {keras.saving.get_registered_name(type(each)): type(each) for each in used}
    named |= keras.saving.get_custom_objects()
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    return {
        name: each
        for name, each in named.items()
        if name in written and (each.__module__ in by_value or "<locals>" in each.__qualname__)
    }


def _require_keras(backend: str, environment: Mapping[str, str | None] | None = None) -> Any:
    if "keras" not in sys.modules:
        for name, value in (environment or {}).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if backend:
            os.environ["KERAS_BACKEND"] = backend
    import keras

    if backend and keras.config.backend() != backend:
        raise ModelError(
            f"the model needs Keras on {backend}, but Keras was imported on {keras.config.backend()} in this "
            f"process: set KERAS_BACKEND={backend} before anything imports keras"
        )
    return keras


@dataclass(frozen=True)
class Described:
    """A loss, metric or optimizer of Keras in serialised form, from which ranks make equal objects.

    Saved estimators hold it, too: attributes that later versions add need a default that is not made by a factory, as
    unpickling does not set them.

    Attributes:
        config: What Keras serialises.
        own: Name -> class for classes that ranks cannot import.
        undecayed: A regular expression for variables without weight decay, which Keras does not serialize.
        arguments: Those of the function behind a loss or metric, of which Keras serializes not all: Huber's ``delta``.
    """

    config: Any
    own: Mapping[str, Any]
    undecayed: str = ""
    arguments: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the same structure, with these in place of what Keras can serialize."""
        if isinstance(value, Mapping):
            return {key: cls.of(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [cls.of(each) for each in value]
        if hasattr(value, "get_config"):
            import keras

            config = keras.saving.serialize_keras_object(value)
            used = [value, getattr(value, "inner_optimizer", value)]
            arguments = dict(getattr(value, "_fn_kwargs", {}))  # it is a dict of Keras, which cannot be pickled
            return cls(config, _own_objects(str(config), used), _undecayed(value), arguments)
        return value

    @classmethod
    def made(cls, value: Any, custom_objects: Mapping[str, Any]) -> Any:
        """Do the inverse of :meth:`of`."""
        if isinstance(value, Mapping):
            return {key: cls.made(each, custom_objects) for key, each in value.items()}
        if isinstance(value, list):
            return [cls.made(each, custom_objects) for each in value]
        if isinstance(value, cls):
            import keras

            # A copy: many from_config methods remove what they have read.
            config = copy.deepcopy(value.config)
            made = keras.saving.deserialize_keras_object(config, custom_objects={**value.own, **custom_objects})
            if value.undecayed:
                getattr(made, "inner_optimizer", made).exclude_from_weight_decay(var_names=[value.undecayed])
            if value.arguments:
                made._fn_kwargs = dict(value.arguments)
            return made
        return value


def _undecayed(value: Any) -> str:
    """Return :attr:`Described.undecayed` for an optimizer.

    Raises:
        ValueError: The optimizer names variables themselves, but the ranks have other ones.
    """
    optimizer = getattr(value, "inner_optimizer", value)
    if getattr(optimizer, "_exclude_from_weight_decay", None):
        raise ValueError(
            "optimizer: exclude_from_weight_decay(var_list=...) names variables of this process, but each rank has its "
            "own: pass their names, exclude_from_weight_decay(var_names=['bias'])"
        )
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    return "" if pattern is None else str(pattern.pattern)
