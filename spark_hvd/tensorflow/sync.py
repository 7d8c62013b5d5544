"""Gives all ranks one rank's variables and objects at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from spark_hvd.collectives.objects import broadcast_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.tensorflow.collectives import name_of
from spark_hvd.tensorflow.tensors import apply, unconverted
from spark_hvd.torch.gradients import Broadcast, Call


def owned(variables: Iterable[Any]) -> list[Any]:
    """Return TensorFlow's variables; Keras variables wrap them."""
    return [variable.value if hasattr(variable, "path") else variable for variable in variables]


@unconverted
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Overwrite variables with those of one rank, all in one exchange.

    Args:
        variables: ``tf.Variable`` or Keras variables, in the same order on every rank.
        root_rank: The rank of the world whose values all ranks get.
        process_set: The ranks that take part.
        inplace: Accepted for Horovod's sake; has no effect.

    Returns:
        In a plain graph, the operation that does it; otherwise None.

    Raises:
        NotInitializedError: Before init().
        ValueError: `root_rank` is not in the process set.
        MismatchError: A variable's dtype or shape differs between ranks. Raised on every rank; nothing has changed.
        CollectiveError: A peer or the network failed.
    """
    own = owned(variables)
    if not own:
        return None
    call = Call(name_of("broadcast_variables", None), process_set, root_rank=root_rank)
    values = apply(Broadcast, [tf.convert_to_tensor(variable) for variable in own], call)
    assignments = [variable.assign(value) for variable, value in zip(own, values, strict=True)]
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*assignments)


def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Overwrite variables with those of one rank, and return them; see :func:`broadcast_variables`.

    Args:
        variables: ``tf.Variable`` or Keras variables, in the same order on every rank.
        root_rank: The rank of the world whose values all ranks get.
        name: Accepted for Horovod's sake; has no effect.
        process_set: The ranks that take part.
    """
    listed = list(variables)
    operation = broadcast_variables(listed, root_rank, process_set)
    if operation is None:
        return listed
    with tf.control_dependencies([operation]):
        return [tf.identity(variable) for variable in owned(listed)]


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an operation that overwrites all variables of a plain graph with those of one rank; run it in a session.

    Raises:
        RuntimeError: Code runs eagerly, so there are no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables: TensorFlow 2 has none; use broadcast_variables(model.weights, 0)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc] # it has no types
    """Overwrites all variables of a plain graph with those of one rank, once its session exists.

    Args:
        root_rank: The rank whose values all ranks get.
        device: Accepted for Horovod's sake; has no effect.
    """

    __module__ = "spark_hvd.tensorflow"

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._graph: Any = None
        self._operation: Any = None

    def begin(self) -> None:
        """Create the operation in the present graph."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._graph is not graph:
            self._graph, self._operation = graph, broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the operation."""
        session.run(self._operation)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that sends one rank's object to all; see :func:`spark_hvd.tensorflow.broadcast_object`.

    Args:
        root_rank: The rank whose object all ranks get.
        session: Accepted for Horovod's sake; has no effect.
        name: Ranks match calls by name.
        process_set: The ranks that take part.
    """
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)
