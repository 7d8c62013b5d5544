"""A fragment: parameters that ranks exchange at the same time, and their values after the last exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spark_hvd.collectives.compression import Compression
from spark_hvd.collectives.execution import single_result
from spark_hvd.collectives.process_set import ProcessSet
from spark_hvd.collectives.start import start_broadcast
from spark_hvd.torch.outer.compressors import Averaging, RowCompressor, pieces


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """The options of LocalSGD or DiLoCo."""

    kind: str
    """``LocalSGD`` or ``DiLoCo``."""
    sync_every: int
    overlap: int
    alpha: float | None
    compression: Any
    process_set: ProcessSet
    name: str = ""
    """Identifies one optimizer; the same on all ranks."""


@dataclass(slots=True)
class _OuterExchange:
    """An exchange in flight."""

    steps: int
    """Number of local steps that it covers."""
    start: list[torch.Tensor]
    """The parameters when it began; empty unless they are needed when it ends."""
    deltas: list[Averaging]
    buffer_layout: FlatTensors
    buffer_start: list[torch.Tensor]
    buffers: list[Averaging]

    def wait(self) -> None:
        """Wait until it is complete; all ranks have started it."""
        for each in (*self.deltas, *self.buffers):
            each.wait()


class Fragment:
    """Some parameters, with floating-point ``buffers`` that are averaged at the same time.

    ``buffers`` lists those of the moment: casts and moves of a module give it others.

    Attributes:
        params: The parameters.
        anchors: Their values after the last exchange, equal on all ranks; at least float32.
        flats: The memory of the anchors.
        lost: The compression error so far; the next exchange includes it.
        wait: Number of local steps after which an exchange begins.
        first_wait: The value of `wait` in the first round and after the ranks have synchronised.
        steps: This rank's local steps since the last exchange that was applied.
        exchange: The exchange in flight.
    """

    def __init__(
        self,
        settings: OuterSettings,
        number: int,
        params: Sequence[torch.nn.Parameter],
        buffers: Callable[[], Sequence[torch.Tensor]],
        wait: int,
    ) -> None:
        self._settings, self._name = settings, f"{settings.name}.{number}"
        self._params, self._list_buffers = FlatTensors(params), buffers
        self.params = list(params)
        self.flats = self._params.read()
        self.anchors = [torch.nn.Parameter(view) for view in self._params.views(self.flats)]
        self.lost = [torch.zeros_like(flat) for flat in self.flats]
        self.first_wait = self.wait = wait
        self.steps = 0
        self.exchange: _OuterExchange | None = None

    @property
    def owes(self) -> bool:
        """Whether this rank has something to send: steps, or the compression error of earlier ones."""
        return self.steps > 0 or any(bool(lost.any()) for lost in self.lost)

    def begin(self, scale: float = 1.0, *, whole: bool = False) -> None:
        """Send the change of the parameters plus the compression error, times `scale`; `whole`: do not compress."""
        process_set, compression = self._settings.process_set, self._settings.compression
        if whole and isinstance(compression, RowCompressor):
            compression = Compression.none
        keeps = self._settings.overlap > 0 and self._settings.alpha is None
        flats = [torch.empty_like(flat) for flat in self.flats]
        start = [torch.empty_like(flat) for flat in self.flats] if keeps else flats
        deltas = [
            Averaging(flat, f"{self._name}.delta.{number}", compression, process_set=process_set)
            for number, flat in enumerate(flats)
        ]
        views = (self._params.views(each) for each in (self.lost, flats, start))
        for (number, _), *alike in zip(self._params.places, self.anchors, self.params, *views, strict=True):
            for anchor, param, lost, delta, kept in pieces(*(each.detach() for each in alike)):
                if keeps:
                    kept.copy_(param)
                # Rounded like the parameters, whose precision may be lower.
                torch.sub(anchor.to(param.dtype).to(delta.dtype), param, out=delta).add_(lost)
                if scale != 1.0:
                    delta.mul_(scale)
                deltas[number].written(delta.numel())
        layout = FlatTensors(self._list_buffers())
        buffer_start = layout.read()
        buffers = [
            Averaging(flat * scale, f"{self._name}.buffers.{number}", process_set=process_set)
            for number, flat in enumerate(buffer_start)
        ]
        for averaging in (*deltas, *buffers):
            averaging.start()
        self.exchange = _OuterExchange(self.steps, start if keeps else [], deltas, layout, buffer_start, buffers)

    def end(self, outer: torch.optim.Optimizer | None) -> None:
        """Wait for the mean, make the outer step, and add what was trained meanwhile."""
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        exchange.wait()
        # The earlier error has been sent, so its memory is free.
        means = [each.mean(lost) for each, lost in zip(exchange.deltas, self.lost, strict=True)]
        buffers = [each.mean(start) for each, start in zip(exchange.buffers, exchange.buffer_start, strict=True)]
        self.lost = [
            lost.zero_() if each.lost is None else each.lost
            for each, lost in zip(exchange.deltas, self.lost, strict=True)
        ]
        if outer is not None:
            for anchor, gradient in zip(self.anchors, self._params.views(means), strict=True):
                anchor.grad = gradient
            outer.step()
            outer.zero_grad(set_to_none=True)
        self.steps -= exchange.steps
        self.wait = self._settings.sync_every
        self._apply(means if outer is None else [], exchange.start)
        exchange.buffer_layout.tensors = list(self._list_buffers())
        if self.steps:
            for target, new, old in zip(buffers, exchange.buffer_layout.read(), exchange.buffer_start, strict=True):
                target.add_(new).sub_(old)
        exchange.buffer_layout.write(buffers)

    def _apply(self, means: list[torch.Tensor], start: list[torch.Tensor]) -> None:
        """Move the parameters to the anchors. Without an outer optimizer, the anchors make their step here."""
        alpha = self._settings.alpha
        views = (self._params.views(each) if each else self.anchors for each in (means, start))
        for alike in zip(self.params, self.anchors, *views, strict=True):
            for param, anchor, mean, begun in pieces(*(each.detach() for each in alike)):
                if means:
                    anchor.sub_(mean)
                if not self.steps or alpha == 0:
                    param.copy_(anchor)
                elif alpha is None:
                    param.add_(anchor - begun)
                else:
                    param.copy_(torch.lerp(anchor, param.to(anchor.dtype), alpha))

    def take_over(self, root_rank: int, *, behind: bool) -> None:
        """Copy the anchors of a rank. If this one is `behind`, also copy its buffers and drop local steps."""
        process_set, layout = self._settings.process_set, FlatTensors(self._list_buffers())
        buffers = layout.read()
        for number, flat in enumerate((*self.flats, *buffers)):
            name = f"{self._name}.leader.{number}"
            start_broadcast([flat], root_rank, name, process_set, single_result, in_place=True, urgent=True).wait()
        if behind:
            self._params.write(self.flats)
            layout.write(buffers)
            for lost in self.lost:
                lost.zero_()
            self.steps = 0


class FlatTensors:
    """Many tensors as a few flat ones for an exchange: one for each device and precision (float32 or float64).

    Attributes:
        sizes: Number of elements of each flat tensor.
        places: Of each tensor, the number of its flat tensor and its first element there.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        double = torch.float64
        kinds = [(each.device, double if each.dtype == double else torch.float32) for each in self.tensors]
        self._kinds = list(dict.fromkeys(kinds))
        self.sizes = [0] * len(self._kinds)
        self.places: list[tuple[int, int]] = []
        for tensor, kind in zip(self.tensors, kinds, strict=True):
            number = self._kinds.index(kind)
            self.places.append((number, self.sizes[number]))
            self.sizes[number] += tensor.numel()

    def read(self) -> list[torch.Tensor]:
        """Return new flat tensors with the current values of the tensors."""
        flats = [
            torch.empty(size, dtype=dtype, device=device)
            for size, (device, dtype) in zip(self.sizes, self._kinds, strict=True)
        ]
        for view, tensor in zip(self.views(flats), self.tensors, strict=True):
            view.copy_(tensor.detach())
        return flats

    def write(self, flats: Sequence[torch.Tensor]) -> None:
        """Copy the values of flat tensors to the tensors."""
        for view, tensor in zip(self.views(flats), self.tensors, strict=True):
            tensor.detach().copy_(view)

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parts of flat tensors, in the order and shapes of the tensors."""
        return [
            flats[number][start : start + tensor.numel()].view(tensor.shape)
            for tensor, (number, start) in zip(self.tensors, self.places, strict=True)
        ]
