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
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
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
