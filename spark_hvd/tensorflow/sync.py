"""The same start for all ranks: variables of one of them, and its objects."""

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
    """TensorFlow's variables; Keras has its own around them."""
    return [variable.value if hasattr(variable, "path") else variable for variable in variables]


@unconverted
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Overwrite variables with those of one rank, all in one exchange.

    Args:
        variables: ``tf.Variable`` or Keras', in the same order on every rank.
        root_rank: Whose values everyone gets; a rank of the world.
        process_set: The ranks that take part.
        inplace: Horovod's; means nothing here.

    Returns:
        In a plain graph the operation that does it; else nothing.

    Raises:
        NotInitializedError: Before init().
        ValueError: `root_rank` is not in the process set.
        MismatchError: The dtype or shape of a variable differs between ranks. Raised on every rank; nothing changed.
        CollectiveError: A peer or the network failed.
    """
    given = owned(variables)
    if not given:
        return None
    call = Call(name_of("broadcast_variables", None), process_set, root_rank=root_rank)
    values = apply(Broadcast, [tf.convert_to_tensor(variable) for variable in given], call)
    done = [variable.assign(value) for variable, value in zip(given, values, strict=True)]
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*done)


def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Overwrite variables with those of one rank, and return them; see :func:`broadcast_variables`.

    Args:
        variables: ``tf.Variable`` or Keras', in the same order on every rank.
        root_rank: Whose values everyone gets; a rank of the world.
        name: Horovod's; means nothing here.
        process_set: The ranks that take part.
    """
    given = list(variables)
    done = broadcast_variables(given, root_rank, process_set)
    if done is None:
        return given
    with tf.control_dependencies([done]):
        return [tf.identity(variable) for variable in owned(given)]


def broadcast_global_variables(root_rank: int) -> Any:
    """An operation that overwrites all variables of a plain graph with those of one rank; run it in a session.

    Raises:
        RuntimeError: There are no global variables where code runs eagerly.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables: TensorFlow 2 has none; use broadcast_variables(model.weights, 0)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc] # it has no types
    """Overwrites all variables of a plain graph with those of one rank, once its session is there.

    Args:
        root_rank: Whose values everyone gets.
        device: Horovod's; means nothing here.
    """

    __module__ = "spark_hvd.tensorflow"

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._graph: Any = None
        self._operation: Any = None

    def begin(self) -> None:
        """Make the operation, in the graph that is there now."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._graph is not graph:
            self._graph, self._operation = graph, broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self._operation)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that gives every rank the object of one; see :func:`spark_hvd.tensorflow.broadcast_object`.

    Args:
        root_rank: Whose object.
        session: Horovod's; means nothing here.
        name: Ranks match calls by it.
        process_set: The ranks that take part.
    """
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)
