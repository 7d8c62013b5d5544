"""The API of elastic training: ``hvd.elastic``, with the state of a PyTorch training."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable
from typing import Any

import torch

from spark_hvd.elastic.run import run
from spark_hvd.elastic.snapshot import Snapshots
from spark_hvd.elastic.state import ObjectState, State
from spark_hvd.torch.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
    get_handler_registry,
    handler_of,
    set_handler_registry,
)
from spark_hvd.torch.sampler import ElasticSampler
from spark_hvd.world.errors import HostsUpdatedInterrupt


class TorchState(ObjectState):
    """The state of a PyTorch training: models, optimizers, samplers, schedulers, and plain objects.

    A commit copies tensors that belong to no optimizer at once. Parameters and state of the state's optimizers are
    copied in the background, until the next `step`. The copies need host memory for two copies of all tensors.

    Args:
        model: A torch.nn.Module.
        optimizer: A torch.optim.Optimizer, usually a DistributedOptimizer.
        **kwargs: More of these, an ElasticSampler, or anything with `state_dict` and `load_state_dict`: a restore keeps
            these objects and restores their contents. Anything else is a plain object, see
            :class:`spark_hvd.elastic.state.ObjectState`. All become attributes. If you assign a new object to one, a
            restore brings back the object of the commit.
    """

    _handlers: dict[str, StateHandler]
    _watched: dict[str, _CopyHook]

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._handlers, self._watched = {}, {}
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_handlers": dict(self._handlers), "_watched": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the hooks of a copy's optimizers, so that they wait for its commits: torch copies no hooks."""
        self.__dict__.update(state)
        self._watch()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_names", ()):
            self._assign(name, value)
        else:
            super().__setattr__(name, value)

    def _assign(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._handlers and self._handlers[name].value is value:
            return
        handler = handler_of(value)
        if handler is None:
            self._handlers.pop(name, None)
        else:
            self._handlers[name] = handler
        self._watch()

    def _watch(self) -> None:
        """Have snapshots copied before any step of the present optimizers."""
        optimizers = {name: item.value for name, item in self._handlers.items() if _is_optimizer(item)}
        for name in [name for name, watch in self._watched.items() if watch.optimizer is not optimizers.get(name)]:
            self._watched.pop(name).end()
        for name in optimizers.keys() - self._watched.keys():
            self._watched[name] = _CopyHook(optimizers[name], self._snapshots)

    def reset(self) -> None:
        """Distribute the rest of the samplers' epochs among the present ranks."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.renewed()

    def save(self) -> None:
        super().save()
        for handler in self._foreign():
            handler.save()

    def restore(self) -> None:
        super().restore()
        for handler in self._foreign():
            handler.restore()

    def sync(self) -> None:
        super().sync()
        for handler in self._foreign():
            handler.save()

    def _foreign(self) -> list[StateHandler]:
        """Return the handlers that keep their own copies, as Horovod's do."""
        return [handler for handler in self._handlers.values() if not isinstance(handler, StateDictHandler)]

    def _ours(self, name: str) -> StateDictHandler | None:
        handler = self._handlers.get(name)
        return handler if isinstance(handler, StateDictHandler) else None

    def _facts(self) -> dict[str, int]:
        facts = super()._facts()
        for name, handler in self._handlers.items():
            if isinstance(handler, SamplerStateHandler):
                facts[f"state.{name}.epoch"] = handler.value.epoch
                facts[f"state.{name}.processed_num"] = handler.value.processed_num
        return facts

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for name in self._names:
            handler = self._handlers.get(name)
            if handler is None:
                content[name] = getattr(self, name)
            elif isinstance(handler, StateDictHandler):
                content[name] = handler.state()
        return content

    def _load(self, name: str, value: Any) -> None:
        handler = self._ours(name)
        if handler is None:
            super()._load(name, value)
        else:
            handler.load(value)

    def _copies(self, name: str) -> bool:
        handler = self._ours(name)
        return handler is not None and handler.copies

    def _reloads(self, name: str) -> bool:
        handler = self._ours(name)
        return handler is not None and handler.reloads

    def _interrupted(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, StateDictHandler):
                handler.interrupted()

    def _kind(self, name: str) -> str:
        handler = self._handlers.get(name)
        return super()._kind(name) if handler is None else f"for a {type(handler).__name__}"

    def _misfit(self, name: str, skeleton: Any) -> str | None:
        handler = self._ours(name)
        fault = None if handler is None else handler.misfit(skeleton)
        return None if fault is None else f"{name}: {fault}"

    def _stable(self) -> Collection[Hashable]:
        ours = (handler for handler in self._handlers.values() if isinstance(handler, StateDictHandler))
        return {key for handler in ours for key in handler.stable()}

    def _extras(self) -> Any:
        return dict(self._handlers)

    def _restore_extras(self, extras: Any) -> None:
        self._handlers = dict(extras)
        for name, handler in self._handlers.items():
            self.__dict__[name] = handler.value
        self._watch()

    def _sync_others(self, root_rank: int) -> None:
        for handler in self._foreign():
            handler.root_rank = root_rank
            handler.sync()

    def _renew(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, StateDictHandler):
                handler.renewed()


class _CopyHook:
    """A hook that waits for the copies of snapshots before a step; it removes itself when they are complete."""

    def __init__(self, optimizer: torch.optim.Optimizer, snapshots: Snapshots) -> None:
        self.optimizer = optimizer
        here = weakref.ref(snapshots)

        def wait_copied(*_: Any) -> None:
            if (there := here()) is not None:
                there.wait_copied()

        self.end = weakref.finalize(snapshots, optimizer.register_step_pre_hook(wait_copied).remove)


def built_optimizer(model: Any, optimizer: Any) -> Any:
    """Return a Keras model's optimizer, built: the given one, or the one from compile(); None if there is none.

    Raises:
        ValueError: The model has no variables yet.
    """
    if not model.built:
        raise ValueError(
            f"model={model.name!r} has no variables yet, so there is no state to keep: give it an Input, or call it on "
            "a batch, before you create the state."
        )
    optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    return optimizer


def _is_optimizer(handler: StateHandler) -> bool:
    return isinstance(handler, OptimizerStateHandler) and isinstance(handler.value, torch.optim.Optimizer)


__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateDictHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
