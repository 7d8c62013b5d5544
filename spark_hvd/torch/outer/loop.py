"""The outer loop of LocalSGD and DiLoCo: when ranks exchange, what they exchange, and the last common parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spark_hvd.collectives.execution import single_result
from spark_hvd.collectives.objects import allgather_object, broadcast_object
from spark_hvd.collectives.process_set import ProcessSet, global_process_set, queue_of
from spark_hvd.collectives.start import start_broadcast
from spark_hvd.context.standing import current, in_world
from spark_hvd.torch.optimizer.arguments import fingerprints, spec_of
from spark_hvd.torch.optimizer.plan import require_same
from spark_hvd.torch.outer.compressors import Averaging, RowCompressor
from spark_hvd.world.errors import MismatchError


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """The options of LocalSGD or DiLoCo."""

    kind: str
    """``LocalSGD`` or ``DiLoCo``."""
    name: str
    """Identifies one optimizer; the same on all ranks."""
    sync_every: int
    overlap: int
    compression: Any
    process_set: ProcessSet


@dataclass(slots=True)
class _OuterExchange:
    """An exchange in flight."""

    steps: int
    """Number of local steps that it covers."""
    start: list[torch.Tensor]
    """The parameters when it began."""
    deltas: list[Averaging]
    buffer_start: list[torch.Tensor]
    buffers: list[Averaging]


class OuterLoop:
    """Counts the local steps of one optimizer, and exchanges their effect with the other ranks.

    Floating-point ``buffers`` are averaged as well.

    Attributes:
        steps: This rank's local steps since the last exchange that was applied.
        count: Number of exchanges that were applied.
        outer: The outer optimizer. It is passed with parameters of the same shapes, and steps on :attr:`anchors`
            instead. None: the parameters are averaged.
    """

    def __init__(
        self,
        settings: OuterSettings,
        names: Sequence[str],
        params: Sequence[torch.nn.Parameter],
        buffers: Sequence[torch.Tensor],
        outer: torch.optim.Optimizer | None,
    ) -> None:
        self._settings = settings
        self._names = list(names)
        self._params, self._buffers = FlatTensors(params), FlatTensors(buffers)
        self._flats = self._params.read()
        self.anchors = [torch.nn.Parameter(view) for view in self._params.views(self._flats)]
        """The parameters after the last exchange, equal on all ranks; at least float32."""
        self._lost = [torch.zeros_like(flat) for flat in self._flats]
        self.outer = outer
        self._begun = False
        self._checked = False
        self._exchange: _OuterExchange | None = None
        self.steps = self.count = 0

    @property
    def _takes_part(self) -> bool:
        process_set = self._settings.process_set
        current()  # raises outside a world
        return process_set is global_process_set or bool(process_set.included())

    # ---- steps --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self) -> None:
        """Prepare for a local step. The first call takes the present weights as the start of training.

        Raises:
            NotInitializedError: Outside a world.
            PlanMismatchError: First call in a world: parameters or settings differ; raised on every rank.
            MismatchError: First call in a world: ranks start from different weights; raised on every rank.
            CollectiveError: A peer or the network failed.
        """
        if self._begun and self._checked:
            return
        if not self._begun:
            self._take_weights()
        if not self._checked and self._takes_part:
            self._check()
        self._checked = True

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a local step, and start or end an exchange when it is due.

        Raises:
            NotInitializedError: Outside a world.
            MismatchError, StalledError, CollectiveError: See NamedHandle.wait.
        """
        if not self._takes_part:
            return
        self.steps += 1
        settings = self._settings
        if self._exchange is None and self.steps >= settings.sync_every:
            self._exchange = self._begin()
        if self._exchange is not None and self.steps - self._exchange.steps >= settings.overlap:
            self._end()

    @torch.no_grad()
    def synchronize(self) -> None:
        """See OuterOptimizer.synchronize."""
        if not self._takes_part:
            return
        self.before_step()
        if self._exchange is not None:
            self._end()
        process_set = self._settings.process_set
        name = f"{self._settings.name}.synchronize"
        facts = allgather_object((self.count, self.steps), name=name, process_set=process_set)
        last = max(count for count, _ in facts)
        leaders = [place for place, (count, _) in enumerate(facts) if count == last]
        if len(leaders) < len(facts):
            self._catch_up(queue_of(process_set).ranks[leaders[0]], last)
        if any(facts[place][1] for place in leaders):
            here = facts[queue_of(process_set).communicator.rank]
            self._exchange = self._begin(len(facts) / len(leaders) if here[0] == last else 0.0)
            self._end()

    def _take_weights(self) -> None:
        for anchor, param in zip(self.anchors, self._params.tensors, strict=True):
            anchor.copy_(param)
        self._begun = True

    def _check(self) -> None:
        settings = self._settings

        def everywhere(fact: Any) -> list[Any]:
            return allgather_object(fact, name=f"{settings.name}.check", process_set=settings.process_set)

        specs = [spec_of(*each) for each in zip(self._names, self._params.tensors, strict=True)]
        chosen = {
            "kind": settings.kind,
            "sync_every": settings.sync_every,
            "overlap": settings.overlap,
            "compression": _name_of(settings.compression),
            "buffers": [list(buffer.shape) for buffer in self._buffers.tensors],
        }
        require_same(specs, chosen, everywhere, settings.kind)
        weights = everywhere(fingerprints(self.anchors))
        different = [name for name, *numbers in zip(self._names, *weights, strict=True) if len(set(numbers)) > 1]
        if different:
            raise MismatchError(
                f"{settings.kind}: ranks start from different weights: {len(different)} of {len(self._names)} "
                f"parameters differ, such as {different[0]!r}; expected the same on every rank. Call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step."
            )

    # ---- exchanges ----------------------------------------------------------------------------------------------

    def _begin(self, scale: float = 1.0) -> _OuterExchange:
        """Send how far the parameters have moved, plus what was lost before, times `scale`."""
        settings = self._settings
        start, buffer_start = self._params.read(), self._buffers.read()
        deltas = []
        for number, (flat, lost) in enumerate(zip(self._base(), self._lost, strict=True)):
            delta = flat.sub_(start[number]).add_(lost).mul_(scale)
            name = f"{settings.name}.delta.{number}"
            deltas.append(Averaging(delta, name, settings.compression, process_set=settings.process_set))
        buffers = [
            Averaging(flat * scale, f"{settings.name}.buffers.{number}", process_set=settings.process_set)
            for number, flat in enumerate(buffer_start)
        ]
        return _OuterExchange(self.steps, start, deltas, buffer_start, buffers)

    def _base(self) -> list[torch.Tensor]:
        """Return the anchors as the parameters held them, rounded if those have lower precision."""
        base = [flat.clone() for flat in self._flats]
        for view, param in zip(self._params.views(base), self._params.tensors, strict=True):
            view.copy_(view.to(param.dtype))
        return base

    def _end(self) -> None:
        """Wait for the mean, make the outer step, and add what was trained meanwhile."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        means = [each.wait() for each in exchange.deltas]
        buffers = [each.wait() for each in exchange.buffers]
        self._lost = [
            lost if each.lost is None else each.lost for each, lost in zip(exchange.deltas, self._lost, strict=True)
        ]
        if self.outer is None:
            for flat, mean in zip(self._flats, means, strict=True):
                flat.sub_(mean)
        else:
            for anchor, gradient in zip(self.anchors, self._params.views(means), strict=True):
                anchor.grad = gradient
            self.outer.step()
            self.outer.zero_grad(set_to_none=True)
        self.count += 1
        self.steps -= exchange.steps
        if self.steps:
            _add(buffers, self._buffers.read(), exchange.buffer_start)
            now, start = self._params.read(), exchange.start
            _add(now, self._flats, start)
            self._params.write(now)
        else:
            self._params.write(self._flats)
        self._buffers.write(buffers)

    def _catch_up(self, root_rank: int, count: int) -> None:
        """Copy the state of a rank that has not joined: some joined before the others' last exchange."""
        process_set, name = self._settings.process_set, f"{self._settings.name}.leader"
        for number, flat in enumerate(self._flats):
            start_broadcast(
                [flat], root_rank, f"{name}.{number}", process_set, single_result, in_place=True, urgent=True
            ).wait()
        mine = {} if self.outer is None else self.outer.state_dict()
        state = broadcast_object(mine, root_rank, name=name, process_set=process_set)
        if self.count == count:
            return
        if self.outer is not None:
            self.outer.load_state_dict(state)
        self._params.write(self._flats)
        for lost in self._lost:
            lost.zero_()
        self.count, self.steps = count, 0

    # ---- state --------------------------------------------------------------------------------------------------

    def forget_exchange(self) -> None:
        """Drop the exchange in flight; its changes go into the next one."""
        self._exchange = None

    def leave_world(self) -> None:
        """Prepare for another world: drop the exchange in flight, and have ranks compared again."""
        self.forget_exchange()
        self._checked = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from. It omits an exchange in flight, whose steps are sent again."""
        return {
            "anchors": list(self._flats),
            "lost": list(self._lost),
            "optimizer": None if self.outer is None else self.outer.state_dict(),
            "steps": self.steps,
            "rounds": self.count,
            "begun": self._begun,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`.

        Raises:
            ValueError: The state belongs to other parameters, or to the other kind of optimizer.
        """
        mine, theirs = ([list(flat.shape) for flat in flats] for flats in (self._flats, state["anchors"]))
        if mine != theirs or (state["optimizer"] is None) is not (self.outer is None):
            raise ValueError(
                f"the state is of {'LocalSGD' if state['optimizer'] is None else 'DiLoCo'} with {theirs} parameters, "
                f"this is {self._settings.kind} with {mine}: load it into an optimizer of the same kind and parameters."
            )
        if self._exchange is not None and in_world():
            for each in (*self._exchange.deltas, *self._exchange.buffers):
                each.wait()  # all ranks have started it
        self.forget_exchange()
        for flat, theirs_flat in zip([*self._flats, *self._lost], [*state["anchors"], *state["lost"]], strict=True):
            flat.copy_(theirs_flat)
        if self.outer is not None:
            self.outer.load_state_dict(state["optimizer"])
        self.steps, self.count, self._begun = state["steps"], state["rounds"], state["begun"]


def _add(targets: Sequence[torch.Tensor], now: Sequence[torch.Tensor], start: Sequence[torch.Tensor]) -> None:
    for target, new, old in zip(targets, now, start, strict=True):
        target.add_(new).sub_(old)


def _name_of(compression: Any) -> str:
    if isinstance(compression, RowCompressor):
        return repr(compression)
    return compression.__name__ if isinstance(compression, type) else type(compression).__name__


class FlatTensors:
    """Many tensors as a few flat ones for exchanges: one per device and precision, float32 or float64."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        double = torch.float64
        kinds = [(each.device, double if each.dtype == double else torch.float32) for each in self.tensors]
        self._kinds = list(dict.fromkeys(kinds))
        self._sizes = [0] * len(self._kinds)
        self._places: list[tuple[int, int]] = []
        for tensor, kind in zip(self.tensors, kinds, strict=True):
            number = self._kinds.index(kind)
            self._places.append((number, self._sizes[number]))
            self._sizes[number] += tensor.numel()

    def read(self) -> list[torch.Tensor]:
        """Return new flat tensors with the present values of the tensors."""
        flats = [
            torch.empty(size, dtype=dtype, device=device)
            for size, (device, dtype) in zip(self._sizes, self._kinds, strict=True)
        ]
        for view, tensor in zip(self.views(flats), self.tensors, strict=True):
            view.copy_(tensor.detach())
        return flats

    def write(self, flats: Sequence[torch.Tensor]) -> None:
        """Copy the values of flat tensors into the tensors."""
        for view, tensor in zip(self.views(flats), self.tensors, strict=True):
            tensor.detach().copy_(view)

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parts of flat tensors, in the order and the shapes of the tensors."""
        return [
            flats[number][start : start + tensor.numel()].view(tensor.shape)
            for tensor, (number, start) in zip(self.tensors, self._places, strict=True)
        ]
