"""The face of elastic training with TensorFlow: ``hvd.elastic``."""

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
    """Handles variables, by their places."""

    copies = True
    reloads = False

    def state(self) -> Any:
        return {str(place): to_torch(tf.convert_to_tensor(variable)) for place, variable in enumerate(self.value)}

    def load(self, state: Any) -> None:
        for place, variable in enumerate(self.value):
            variable.assign(to_tensorflow(state[str(place)].clone()))  # TensorFlow may keep the very memory


get_handler_registry()[:0] = [(_OwnedVariables, _TensorFlowHandler)]


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate the function that trains, ``func(state, ...)``, so that it survives changes of the membership.

    See :func:`spark_hvd.torch.elastic.run`. What a collective raised inside a graph is raised as itself.
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
        variables: ``tf.Variable`` or Keras', in the same order on every rank.
        session: Of TensorFlow 1, in whose graphs variables have no values outside of it: only None is taken.
        **kwargs: See :class:`spark_hvd.elastic.state.ObjectState`.

    Raises:
        ValueError: `session` is given.
    """

    __module__ = "spark_hvd.tensorflow.elastic"

    def __init__(self, variables: Iterable[Any], session: Any = None, **kwargs: Any) -> None:
        if session is not None:
            raise ValueError(f"session={session!r}: a state is of variables outside of sessions; leave session out")
        super().__init__(variables=_OwnedVariables(owned(variables)), **kwargs)


class TensorFlowKerasState(TensorFlowState):
    """The state of a training of a Keras model in a loop of one's own.

    Args:
        model: A model that is built.
        optimizer: Its optimizer, which is built here if need be; None: the one that the model was compiled with.
        backend: Horovod's; means nothing here.
        **kwargs: See :class:`spark_hvd.elastic.state.ObjectState`.

    Raises:
        ValueError: The model has no variables yet.
    """

    __module__ = "spark_hvd.tensorflow.elastic"

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        optimizer = built_optimizer(model, optimizer)
        super().__init__([*model.weights, *(optimizer.variables if optimizer is not None else ())], **kwargs)


__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
