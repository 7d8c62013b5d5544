"""How the parts of a TorchState are saved, restored and sent: a handler for each kind of thing."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch

from spark_hvd.context.local import require_no_tables
from spark_hvd.elastic.skeleton import TensorRef, tensor_key, tensors_in
from spark_hvd.torch.sampler import ElasticSampler
from spark_hvd.torch.sync import load_optimizer_state
from spark_hvd.transport.torch_private import with_versions


class StateHandler:
    """Saves, restores and synchronizes one value; the base of users' own handlers, as in Horovod.

    A direct subclass implements `save`, `restore` and `sync`.

    Args:
        value: The value to handle.

    Attributes:
        value: The value.
        root_rank: The rank whose state all ranks get; set before `sync` is called.
    """

    __module__: str = "spark_hvd.torch.elastic"

    root_rank = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value, for :meth:`restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last copy; it may be called before there is one."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the value of `root_rank`. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another value from now on."""
        self.value = value


class StateDictHandler(StateHandler):
    """Handles anything with `state_dict` and `load_state_dict`, such as a learning rate scheduler or a GradScaler.

    The TorchState saves, restores and sends the result of :meth:`state`. Derive from this class for objects whose
    methods have other names.
    """

    __module__ = "spark_hvd.torch.elastic"

    @property
    def copies(self) -> bool:
        """Whether :meth:`load` only copies from the tensors it is given, from whatever device."""
        return False

    reloads = True
    """Whether the value may be half used, as an iterator is: then each sync has it load its state on every rank."""

    def state(self) -> Any:
        """The state to save and send: dicts, lists and tuples of tensors, which may be the value's own."""
        return self.value.state_dict()

    def load(self, state: Any) -> None:
        """Load a result of :meth:`state`, of this process or another; its tensors may be kept."""
        self.value.load_state_dict(state)

    def misfit(self, skeleton: Any) -> str | None:
        """Why the value could not load what has this skeleton (tensors are :class:`TensorRef`); None if it could."""
        return None

    def stable(self) -> Collection[Hashable]:
        """Keys of the tensors that only a step of the value changes, an optimizer."""
        return ()

    def interrupted(self) -> None:
        """The function that uses the value is about to be left, in order; :meth:`renewed` follows in the next world."""

    def renewed(self) -> None:
        """The value has been restored, or made equal on all ranks."""


class ModelStateHandler(StateDictHandler):
    """Handles a torch.nn.Module: its parameters, and its buffers if they are persistent."""

    __module__ = "spark_hvd.torch.elastic"

    reloads = False

    def __init__(self, value: Any) -> None:
        require_no_tables(value, "a TorchState")
        super().__init__(value)

    @property
    def copies(self) -> bool:
        # A module may keep what it is given of anything else: an extra state, or the sums of a metric.
        places = chain(
            self.value.named_parameters(remove_duplicate=False), self.value.named_buffers(remove_duplicate=False)
        )
        return bool(self.value.state_dict().keys() <= {name for name, _ in places})

    def state(self) -> Any:
        return dict(self.value.state_dict())

    def load(self, state: Any) -> None:
        self.value.load_state_dict(with_versions(state, self.value))  # the same code wrote and reads it

    def misfit(self, skeleton: Any) -> str | None:
        return difference(self.value.state_dict(), skeleton)


class OptimizerStateHandler(StateDictHandler):
    """Handles a torch.optim.Optimizer, including a DistributedOptimizer. Gradients are not part of the state.

    A restore or a sync sets them to None, so that no gradient from before is added to the next.
    """

    __module__ = "spark_hvd.torch.elastic"

    reloads = False

    def __init__(self, value: Any) -> None:
        require_no_tables(value, "a TorchState")
        super().__init__(value)

    def load(self, state: Any) -> None:
        load_optimizer_state(self.value, state)

    def misfit(self, skeleton: Any) -> str | None:
        ours = [len(group["params"]) for group in self.value.param_groups]
        theirs = [len(group["params"]) for group in skeleton["param_groups"]]
        return None if ours == theirs else f"it has parameter groups of {ours} parameters here, of {theirs} there"

    def stable(self) -> Collection[Hashable]:
        params = [param for group in self.value.param_groups for param in group["params"]]
        tensors = [*params, *tensors_in(dict(self.value.state))]
        return [tensor_key(tensor) for tensor in tensors if tensor.layout is torch.strided]

    def renewed(self) -> None:
        for group in self.value.param_groups:
            for param in group["params"]:
                param.grad = None


class SamplerStateHandler(StateDictHandler):
    """Handles an ElasticSampler: epoch and progress."""

    __module__ = "spark_hvd.torch.elastic"

    def renewed(self) -> None:
        """Deal out what is left among the ranks that are there now."""
        self.value.reset()


@runtime_checkable
class LoopStateful(Protocol):
    """A loader that tells whether the loop over it has ended: a loader of a data set of the run."""

    def loop_state_dict(self) -> dict[str, Any]:
        """Where it stands, for a loop that is entered again."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Have the next iteration go on from there."""


class LoaderStateHandler(StateDictHandler):
    """Handles a loader of a data set of the run: its place in the epoch."""

    __module__ = "spark_hvd.torch.elastic"

    def state(self) -> Any:
        return self.value.loop_state_dict()

    def interrupted(self) -> None:
        """Stay where the loop is, which ends with the function."""
        self.load(self.state())


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state dict."""

    def state_dict(self) -> dict[str, Any]:
        """What it is made of."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Become what that was made of."""


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (LoopStateful, LoaderStateHandler),
    (Stateful, StateDictHandler),
]


_PROTOCOLS = (LoopStateful, Stateful)
_PLAIN = {bool, int, float, str, bytes, type(None), tuple, list, dict}
"""What a loop assigns at every step, and what has no `state_dict`: to look for one takes longer than the assignment."""


def get_handler_registry() -> Registry:
    """The list of (class, handler class) pairs; the first match is used. You may change the list."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the list. Existing states keep their handlers."""
    global _registry
    _registry = registry


def handler_of(value: Any) -> StateHandler | None:
    """A new handler for a value; None for a plain object."""
    if isinstance(value, type):
        return None
    plain = type(value) in _PLAIN
    kinds = (each for each in _registry if not (plain and each[0] in _PROTOCOLS))
    return next((handler(value) for kind, handler in kinds if isinstance(value, kind)), None)


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first tensor by name whose dtype or shape differs between two states, and how; None if none does."""
    for name in sorted(mine.keys() | theirs.keys()):
        here, there = _described(mine.get(name)), _described(theirs.get(name))
        if here != there:
            return f"{name!r} is {here} here, and {there} there"
    return None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor | TensorRef):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return "missing" if value is None else "no tensor"
