"""How the parts of a TorchState are saved, restored and sent: one handler class for each kind of value."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch

from spark_hvd.context.local import require_no_tables
from spark_hvd.elastic.skeleton import TensorRef, tensor_key, tensors_in
from spark_hvd.torch.sampler import ElasticSampler
from spark_hvd.torch.sync import load_optimizer_state
from spark_hvd.transport.torch_private import with_versions

_log = logging.getLogger("spark_hvd")


class StateHandler:
    """Saves, restores and synchronises one value; the base class of users' handlers, as in Horovod.

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
        """Keep a copy of the value for :meth:`restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last copy; may be called before there is one."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the value of `root_rank`. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the value."""
        self.value = value


class StateDictHandler(StateHandler):
    """Handles anything with `state_dict` and `load_state_dict`, such as a learning rate scheduler or a GradScaler.

    The TorchState saves, restores and sends the result of :meth:`state`. Derive from this class for objects whose
    methods have other names.
    """

    __module__ = "spark_hvd.torch.elastic"

    @property
    def copies(self) -> bool:
        """Whether :meth:`load` only copies from its tensors, whatever their device."""
        return False

    reloads = True
    """Whether the value may be half used, as an iterator: then each sync makes it load its state on every rank."""

    def state(self) -> Any:
        """Return the state to save and send: dicts, lists and tuples of tensors, which may be the value's own."""
        return self.value.state_dict()

    def load(self, state: Any) -> None:
        """Load a result of :meth:`state`, from this process or another; may keep its tensors."""
        self.value.load_state_dict(state)

    def misfit(self, skeleton: Any) -> str | None:
        """Return why the value cannot load a state with this skeleton (tensors are :class:`TensorRef`), or None."""
        return None

    def stable(self) -> Collection[Hashable]:
        """Return keys of tensors that only a step of the value, an optimizer, changes."""
        return ()

    def interrupted(self) -> None:
        """Prepare for leaving the function that uses the value; :meth:`renewed` follows in the next world."""

    def renewed(self) -> None:
        """Act after the value has been restored or synchronised."""


class ModelStateHandler(StateDictHandler):
    """Handles a torch.nn.Module: its parameters, and its persistent buffers."""

    __module__ = "spark_hvd.torch.elastic"

    reloads = False

    def __init__(self, value: Any) -> None:
        require_no_tables(value, "a TorchState")
        super().__init__(value)

    @property
    def copies(self) -> bool:
        # A module may keep the objects that it loads for anything else: an extra state, or the sums of a metric.
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

    A restore or a sync sets them to None, so that no earlier gradient is added to the next one.
    """

    __module__ = "spark_hvd.torch.elastic"

    reloads = False

    def __init__(self, value: Any) -> None:
        require_no_tables(value, "a TorchState")
        super().__init__(value)

    def load(self, state: Any) -> None:
        groups, known = self.value.param_groups, len(state.get("param_groups", self.value.param_groups))
        if added := groups[known:]:
            _log.warning(
                "restore: removed %d parameter groups that %s got after the commit; add them again to train them",
                len(added),
                type(self.value).__name__,
            )
        for group in added:
            for param in group["params"]:
                self.value.state.pop(param, None)
                param.grad = None
        del groups[known:]
        load_optimizer_state(self.value, state)

    def misfit(self, skeleton: Any) -> str | None:
        own = [len(group["params"]) for group in self.value.param_groups]
        other = [len(group["params"]) for group in skeleton["param_groups"]]
        return None if own == other else f"its parameter groups have {own} parameters here, {other} there"

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
        """Distribute the rest of the epoch among the present ranks."""
        self.value.reset()


@runtime_checkable
class LoopStateful(Protocol):
    """A loader of one of the run's data sets: it can tell whether the loop over it has ended."""

    def loop_state_dict(self) -> dict[str, Any]:
        """Return its position, for a loop that is entered again."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Make the next iteration continue from there."""


class LoaderStateHandler(StateDictHandler):
    """Handles a loader of one of the run's data sets: its position in the epoch."""

    __module__ = "spark_hvd.torch.elastic"

    def state(self) -> Any:
        return self.value.loop_state_dict()

    def interrupted(self) -> None:
        """Keep the position of the loop, which ends with the function."""
        self.load(self.state())


@runtime_checkable
class Stateful(Protocol):
    """An object with a state dict."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a result of :meth:`state_dict`."""


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
"""Types without a `state_dict` that loops assign at every step: looking for one takes longer than the assignment."""


def get_handler_registry() -> Registry:
    """Return the list of (class, handler class) pairs; the first match is used. You may change the list."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the list. Existing states keep their handlers."""
    global _registry
    _registry = registry


def handler_of(value: Any) -> StateHandler | None:
    """Return a new handler for a value; None for a plain object."""
    if isinstance(value, type):
        return None
    plain = type(value) in _PLAIN
    kinds = (each for each in _registry if not (plain and each[0] in _PROTOCOLS))
    return next((handler(value) for kind, handler in kinds if isinstance(value, kind)), None)


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Describe the first tensor, by name, whose dtype or shape differs between two states; None if none does."""
    for name in sorted(mine.keys() | theirs.keys()):
        here, there = _described(mine.get(name)), _described(theirs.get(name))
        if here != there:
            return f"{name!r} is {here} here, and {there} there"
    return None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor | TensorRef):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return "missing" if value is None else "no tensor"
