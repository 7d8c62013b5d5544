"""The API of elastic training with TensorFlow: ``hvd.elastic``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

import tensorflow as tf

from spark_hvd.elastic import run as elastic_run
from spark_hvd.elastic.state import ObjectState, State
from spark_hvd.tensorflow.sync import owned
from spark_hvd.tensorflow.tensors import cause_of, to_tensorflow, to_torch
from spark_hvd.torch.elastic import TorchState, built_optimizer
from spark_hvd.torch.handlers import StateDictHandler, get_handler_registry
from spark_hvd.world.errors import HostsUpdatedInterrupt

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class _OwnedVariables(list[Any]):
    """Variables of TensorFlow, in the same order on every rank."""


class _TensorFlowHandler(StateDictHandler):
    """Handles variables, identified by their positions."""

    copies = True
    reloads = False

    def state(self) -> Any:
        return {str(place): to_torch(tf.convert_to_tensor(variable)) for place, variable in enumerate(self.value)}

    def load(self, state: Any) -> None:
        for place, variable in enumerate(self.value):
            variable.assign(to_tensorflow(state[str(place)].clone()))  # TensorFlow may keep this memory


get_handler_registry()[:0] = [(_OwnedVariables, _TensorFlowHandler)]


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate the training function, ``func(state, ...)``, so that it survives changes of the membership.

    See :func:`spark_hvd.torch.elastic.run`. If a collective raises inside a graph, its own exception is raised.
    """

    @functools.wraps(func)
    def trained(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return func(state, *args, **kwargs)
        except tf.errors.OpError as error:
            if (cause := cause_of(error)) is not None:
                raise cause from error
            raise

    return elastic_run.run(trained)  # type: ignore[type-var] # it says what is no state


class TensorFlowState(TorchState):
    """The state of a training: variables and plain objects.

    Args:
        variables: ``tf.Variable`` or Keras variables, in the same order on every rank.
        session: For TensorFlow 1, where variables have values only in a session; must be None.
        **kwargs: See :class:`spark_hvd.elastic.state.ObjectState`.

    Raises:
        ValueError: `session` is given.
    """

    __module__ = "spark_hvd.tensorflow.elastic"

    def __init__(self, variables: Iterable[Any], session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise ValueError(f"session={session!r}: a state needs variables outside sessions; omit session")
        super().__init__(variables=_OwnedVariables(owned(variables)), **kwargs)


class TensorFlowKerasState(TensorFlowState):
    """The state of a training of a Keras model in a custom loop.

    Args:
        model: A model that is built.
        optimizer: Its optimizer, which is built here if necessary; None: the one that the model was compiled with.
        backend: Accepted for Horovod's sake; has no effect.
        **kwargs: See :class:`spark_hvd.elastic.state.ObjectState`.

    Raises:
        ValueError: The model has no variables yet.
    """

    __module__ = "spark_hvd.tensorflow.elastic"

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        optimizer = built_optimizer(model, optimizer)
        super().__init__([*model.weights, *(optimizer.variables if optimizer is not None else ())], **kwargs)


__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
