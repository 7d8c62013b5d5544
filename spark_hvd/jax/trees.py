"""Moves pytrees between ranks, and between JAX and checkpoints, as numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.collectives.process_set import global_process_set
from spark_hvd.context.basics import rank
from spark_hvd.world.errors import MismatchError


def over_devices(*axes: str | None) -> NamedSharding:
    """Return a sharding over all ranks' devices in a row: "data" divides a dimension; without it, all have a copy."""
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec(*axes))


def broadcast(tree: Any, root_rank: int = 0, sharding: Any = None) -> Any:
    """Give every rank the pytree of one rank, as global arrays. All ranks must call it.

    Args:
        tree: A pytree whose leaves are arrays of JAX or numpy, of any dtype and shape, keys of jax.random, or plain
            objects. On the other ranks it has the same structure, shapes and dtypes; its values are not used.
        root_rank: The rank whose values all ranks get.
        sharding: How the arrays are laid out over the devices of all ranks; None for a full copy on each device.

    Returns:
        The tree, with jax.Array in place of arrays.

    Raises:
        NotInitializedError: Before init().
        ValueError: `root_rank` is not a rank, or an array has numbers that JAX would truncate to 32 bits.
        MismatchError: The trees differ in structure, shapes or dtypes. Raised on every rank.
        CollectiveError: A peer or the network failed.
    """
    global_process_set.require_root(root_rank)
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {_name(path): leaf for path, leaf in paths}
    outlines = allgather_object({name: _outline(leaf) for name, leaf in leaves.items()}, "spark_hvd.jax.outline")
    for other, outline in enumerate(outlines):
        if outline != outlines[root_rank]:
            where = _first(outline, outlines[root_rank], f"rank {other}", f"rank {root_rank}")
            raise MismatchError(f"broadcast: the trees of two ranks differ: {where}")
    whole = {name: _whole(leaf) for name, leaf in leaves.items()}
    got = broadcast_object(whole if rank() == root_rank else {}, root_rank, "spark_hvd.jax.broadcast")
    sharding = sharding or over_devices()
    return structure.unflatten([_placed(got[name], leaf, sharding, name) for name, leaf in leaves.items()])


def state_dict(tree: Any) -> dict[str, Any]:
    """Return a pytree as plain data for ``hvd.checkpoint.save``: leaves by their paths, such as ``['dense']['bias']``.

    All ranks must call it: arrays that are divided among ranks are gathered.

    Args:
        tree: As for :func:`broadcast`; plain objects must be numbers, text or bytes.

    Returns:
        A tensor for each array, with its shape and dtype, on the CPU; a dict with two entries for a dtype that torch or
        numpy lacks.

    Raises:
        CollectiveError: A peer or the network failed while arrays were gathered.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    whole = {_name(path): _whole(leaf) for path, leaf in paths}
    return {name: _tensor(value) if isinstance(value, np.ndarray) else value for name, value in whole.items()}


def load_state_dict(tree: Any, state: Mapping[str, Any]) -> Any:
    """Rebuild the tree of a :func:`state_dict`. All ranks must call it with the same `state`.

    Args:
        tree: A tree with the same structure, shapes and dtypes, as at the start of training. Its arrays say where to
            put
            the new ones: on the same devices in the same parts, wherever they were when the state was saved.
        state: The saved state.

    Returns:
        A new tree.

    Raises:
        ValueError: The trees differ; the text says where.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {_name(path): leaf for path, leaf in paths}
    saved = {name: _array(value) for name, value in state.items()}
    wanted = {name: _outline(leaf) for name, leaf in leaves.items()}
    there = {name: _outline(value) for name, value in saved.items()}
    if wanted != there:
        where = _first(there, wanted, "the state", "this rank")
        raise ValueError(f"the state belongs to another tree: {where}. Load it into a tree of the saved model")
    return structure.unflatten(
        [_placed(saved[name], leaf, getattr(leaf, "sharding", None), name) for name, leaf in leaves.items()]
    )


def placed(array: np.ndarray[Any, Any], sharding: Any, name: str) -> Any:
    """Return the global array of which ``array`` is this rank's part.

    Raises:
        TypeError, ValueError: As :func:`_check`.
    """
    _check(array, name)
    return jax.make_array_from_process_local_data(sharding, array)


def _check(array: np.ndarray[Any, Any], name: str) -> None:
    """Check that JAX can hold an array.

    Raises:
        TypeError: The array does not hold numbers.
        ValueError: JAX would truncate the numbers to 32 bits.
    """
    if array.dtype.kind not in "biufcV":
        raise TypeError(f"{name} is an array of {array.dtype}: expected numbers; leave it out, or convert it")
    if array.dtype.kind in "iu" and array.dtype.itemsize == 8 and array.size and not jax.config.jax_enable_x64:
        narrow = np.iinfo(f"{array.dtype.kind}4")
        if array.min() < narrow.min or array.max() > narrow.max:
            raise ValueError(
                f"{name} has numbers from {array.min()} to {array.max()}, which JAX would truncate to 32 bits. Call "
                'jax.config.update("jax_enable_x64", True) before the first array, or use smaller numbers'
            )


def _name(path: Any) -> str:
    return str(jax.tree_util.keystr(path)) or "the tree"


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _outline(leaf: Any) -> str:
    """Describe what must be the same on all ranks, and in the saved state."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return type(leaf).__name__


def _first(mine: Mapping[str, str], theirs: Mapping[str, str], one: str, other: str) -> str:
    name = next(name for name in [*theirs, *mine] if mine.get(name) != theirs.get(name))
    return f"{name} is {mine.get(name, 'missing')} in that of {one}, {theirs.get(name, 'missing')} in that of {other}"


def _whole(leaf: Any) -> Any:
    """Return an array with all its numbers on this host; if it is divided among ranks, all ranks must call this."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if not isinstance(leaf, jax.Array):
        return leaf
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def _placed(value: Any, like: Any, sharding: Any, name: str) -> Any:
    """Place a full array as `sharding` says, as a key if `like` is one."""
    if not isinstance(value, np.ndarray) or sharding is None:
        return value
    if _is_key(like):
        return jax.random.wrap_key_data(placed(value, over_devices(), name), impl=jax.random.key_impl(like))
    if sharding.is_fully_replicated:
        return placed(value, sharding, name)
    _check(value, name)
    return jax.make_array_from_callback(value.shape, sharding, lambda part: value[part])


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    array = np.array(array, order="C")  # torch needs writable memory
    if array.dtype.kind == "V":  # bfloat16, float8 and others, which numpy does not define
        return {"dtype": array.dtype.name, "bits": torch.from_numpy(array.view(f"u{array.dtype.itemsize}"))}
    return torch.from_numpy(array)


def _array(value: Any) -> Any:
    if isinstance(value, dict):
        return value["bits"].numpy().view(jax.numpy.dtype(value["dtype"]))
    return value.numpy() if isinstance(value, torch.Tensor) else value
