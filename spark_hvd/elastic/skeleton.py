"""Splits nested values into a small skeleton, which can be pickled or copied, and their tensors."""

from __future__ import annotations

import bisect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spark_hvd.collectives.fusion import batches, flatten, unflatten_into
from spark_hvd.transport.communicator import Communicator
from spark_hvd.transport.shapes import require_dense

DICTS = dict, OrderedDict, defaultdict
"""Types that are searched for tensors, besides lists and tuples. Subclasses are not, because they may be built in
another way."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Represents a tensor in a skeleton."""

    number: int
    """The number of the tensor. Names of the same tensor, such as tied weights, share it."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    """The type of the device."""
    is_parameter: bool
    requires_grad: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRef:
        return self  # it never changes, and a commit would copy hundreds


class TensorTable:
    """The tensors of one or several values, each once, in the order in which they are found."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.keys: list[Hashable] = []
        """The keys of the tensors, see :func:`tensor_key`."""
        self._known: dict[Hashable, int] = {}

    def flatten(self, value: Any) -> Any:
        """Return ``value`` with references instead of its tensors.

        Tensors are only found in dicts, lists and tuples. Other objects, and parts without tensors, are not copied.

        Raises:
            TypeError: A tensor is sparse, has no memory here, or is on neither a CPU nor a GPU.
        """
        return rebuilt(value, lambda leaf: self._ref(leaf) if isinstance(leaf, torch.Tensor) else leaf)

    def _ref(self, tensor: torch.Tensor) -> TensorRef:
        require_dense(tensor)
        key = tensor_key(tensor)
        number = self._known.setdefault(key, len(self.tensors)) if tensor.numel() else len(self.tensors)
        if number == len(self.tensors):
            self.tensors.append(tensor.detach())
            self.keys.append(key)
        return TensorRef(
            number,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.device.type,
            # Check the exact type first: isinstance of a Parameter takes longer than everything else here.
            type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter),
            tensor.requires_grad and tensor.is_leaf,
        )


def tensor_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors with the same elements of the same memory, in the same order."""
    # The key needs no device, because different devices have different addresses.
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors that :meth:`TensorTable.flatten` would find, including those that it would refuse."""
    found: list[torch.Tensor] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    rebuilt(value, look)
    return found


def unflatten(skeleton: Any, tensor_of: Callable[[TensorRef], torch.Tensor]) -> Any:
    """Return the value of a skeleton, with tensors instead of references.

    ``tensor_of`` is called for each reference, even if several have the same number.
    """

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, TensorRef):
            return leaf
        tensor = tensor_of(leaf)
        if leaf.is_parameter:
            return torch.nn.Parameter(tensor, leaf.requires_grad)
        return tensor.requires_grad_() if leaf.requires_grad else tensor

    return rebuilt(skeleton, filled)


class Receivers:
    """The tensors that receive those of another rank. They use existing memory if it fits.

    Attributes:
        tensors: The tensors by number.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._used: list[tuple[int, int]] = []  # sorted (first address, address after the last)
        self._within: set[int] = set()

    def prepare(self, skeleton: Any, mine: Any = None) -> None:
        """Find or allocate a tensor for each reference of a skeleton.

        Tensors of ``mine``, this rank's value, are used if they fit, and will be overwritten.
        """
        if isinstance(skeleton, TensorRef):
            if skeleton.number not in self.tensors:
                self.tensors[skeleton.number] = self._receiver(skeleton, mine)
        elif id(skeleton) not in self._within:
            self._within.add(id(skeleton))
            if type(skeleton) in DICTS:
                existing = mine if isinstance(mine, dict) else {}
                for key, item in skeleton.items():
                    self.prepare(item, existing.get(key))
            elif type(skeleton) in (list, tuple):
                matches = type(mine) is type(skeleton) and len(mine) == len(skeleton)
                for index, item in enumerate(skeleton):
                    self.prepare(item, mine[index] if matches else None)
            self._within.remove(id(skeleton))

    def _receiver(self, ref: TensorRef, mine: Any) -> torch.Tensor:
        if not _fits(ref, mine):
            return _empty(ref)
        begin = mine.data_ptr()
        end = begin + mine.nbytes
        place = bisect.bisect(self._used, (begin, begin))
        # Tensors that overlap here may be separate on the sender, so each needs its own memory.
        if begin < end and any(
            before < end and begin < after for before, after in self._used[max(place - 1, 0) : place + 1]
        ):
            return _empty(ref)
        self._used.insert(place, (begin, end))
        fitting: torch.Tensor = mine.detach()
        return fitting

    def in_order(self) -> list[torch.Tensor]:
        """Return the tensors in the sender's order."""
        return [self.tensors[number] for number in range(len(self.tensors))]


def _fits(ref: TensorRef, mine: Any) -> bool:
    return (
        isinstance(mine, torch.Tensor)
        and (mine.dtype, tuple(mine.shape), mine.device.type) == (ref.dtype, ref.shape, ref.device)
        and mine.is_contiguous()
        and not mine.is_inference()
    )


def _empty(ref: TensorRef) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device()) if ref.device == "cuda" else ref.device
    return torch.empty(ref.shape, dtype=ref.dtype, device=device)


def broadcast_all(communicator: Communicator, tensors: Sequence[torch.Tensor], root_rank: int) -> None:
    """Overwrite tensors with those of one rank, in batches of bounded size.

    ``tensors`` must have the same dtypes, shapes and types of devices on every rank.
    """
    for members in batches(tensors):
        batch = [tensors[index] for index in members]
        if len(batch) == 1:
            communicator.broadcast(batch[0], root_rank).wait()
            continue
        flat = flatten(batch)
        communicator.broadcast(flat, root_rank).wait()
        if communicator.rank != root_rank:
            unflatten_into(flat, batch)


def rebuilt(value: Any, change: Callable[[Any], Any], within: frozenset[int] = frozenset()) -> Any:
    """Apply ``change`` to the leaves of nested dicts, lists and tuples. Containers without changes are not copied.

    A leaf is any value that is not such a container. ``within`` has the ids of the enclosing containers.
    """
    kind = type(value)
    if kind not in DICTS and kind not in (list, tuple):
        return change(value)
    if id(value) in within:  # a container that contains itself is not changed
        return value
    within |= {id(value)}
    if kind in DICTS:
        items: Any = {key: rebuilt(item, change, within) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        return defaultdict(value.default_factory, items) if kind is defaultdict else kind(items)
    items = [rebuilt(item, change, within) for item in value]
    return kind(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
