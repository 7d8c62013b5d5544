"""NCCL between ranks with simulated devices: Gloo moves the numbers, and separate streams keep NCCL's order.

As with ProcessGroupNCCL, a collective runs on its own stream for its group and device, after the work on the caller's
current stream of that device, and only `wait` makes the then current stream wait for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu_sim.device import DEVICES, SimulatedEvent, SimulatedStream, current_stream, observed, where
from tests.gpu_sim.order import Communicator, Launch

launches: list[Launch] = []
"""The collectives that this rank has started, in order."""
_streams: dict[tuple[Any, int], SimulatedStream] = {}
_started: dict[Communicator, list[tuple[SimulatedStream, int]]] = {}


def forget() -> None:
    """Forget what was started; the clocks restart, too."""
    launches.clear()
    _started.clear()


def _note(group: Any, name: str, first: torch.Tensor, own: SimulatedStream, moment: int) -> None:
    """Record a launch, and what its stream knows of those on other communicators."""
    communicator = getattr(group, "group_name", "default"), own.device.index % (DEVICES // 2)
    after = []
    for other, started in _started.items():
        known = [number for number, use in enumerate(started) if observed.clocks.knows(own.key, (use[0].key, use[1]))]
        if other != communicator and known:
            after.append((other, known[-1]))
    size = "" if name == "all_to_all_single" else f" of {first.numel()}"  # the size differs there
    what = f"{name}{size} {first.dtype} {where().rpartition(':')[0]})"  # with the caller, as numbers may be the same
    launches.append(Launch(communicator, dist.get_world_size(group), what, after))
    _started.setdefault(communicator, []).append((own, moment))


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor on the same memory."""
    assert tensor.is_contiguous(), "NCCL takes contiguous tensors only"
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class SimulatedWork:
    """Replaces the work of ``ProcessGroupNCCL``."""

    def __init__(self, in_flight: Any, after: Callable[[], None], device: torch.device, held: Sequence[Any]) -> None:
        self._in_flight, self._after, self._device = in_flight, after, device
        self._held: Sequence[Any] = held  # like torch: until a thread waits
        self.event = SimulatedEvent()

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait; the numbers are complete afterwards, too."""
        current_stream(self._device).wait_event(self.event)
        if self._in_flight is not None:
            self._in_flight.wait()
            self._after()
        self._in_flight, self._held = None, ()
        return True

    def is_completed(self) -> bool:
        """A device is always behind its host."""
        return self._in_flight is None


def _run(
    name: str,
    group: Any,
    outs: Sequence[torch.Tensor],
    ins: Sequence[torch.Tensor],
    async_op: bool,
    start: Callable[[], Any],
    after: Callable[[], None] = lambda: None,
) -> SimulatedWork | None:
    place = outs[0].device
    devices = {tensor.device for tensor in [*outs, *ins]}
    if len(devices) > 1:
        raise RuntimeError(f"NCCL: the tensors of one collective are on {sorted(map(str, devices))}")
    if place.index not in observed.own:
        observed.faults.append(f"{where()}NCCL is started on {place}, which is another rank's")
    own = _streams.setdefault((group, place.index), SimulatedStream(place))
    own.wait_stream(current_stream(place))
    used = [(tensor.untyped_storage().data_ptr(), False) for tensor in ins]
    used += [(tensor.untyped_storage().data_ptr(), True) for tensor in outs]
    observed.kernels.append((f"nccl::{name}", *own.key))
    before = len(observed.clocks.faults)
    moment = observed.clocks.ran(f"NCCL's {name}", own.key, used)
    _note(group, name, outs[0], own, moment)
    observed.clocks.faults[before:] = [where() + fault for fault in observed.clocks.faults[before:]]
    work = SimulatedWork(start(), after, place, [*outs, *ins])
    work.event.record(own)
    if async_op:
        return work
    work.wait()
    return None


_all_reduce, _broadcast, _all_gather = dist.all_reduce, dist.broadcast, dist.all_gather
_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def all_reduce(tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Any:
    """Do the same as torch's."""
    if not tensor.is_cuda:
        return _all_reduce(tensor, op, group, async_op)
    memory = on_host(tensor)

    def start() -> Any:
        if op != _AVG:
            return _all_reduce(memory, op, group, async_op=True)
        memory.mul_(1 / dist.get_world_size(group))  # NCCL multiplies before it adds
        return _all_reduce(memory, _SUM, group, async_op=True)

    return _run("all_reduce", group, [tensor], [], async_op, start)


def broadcast(tensor: torch.Tensor, src: Any = None, group: Any = None, async_op: bool = False) -> Any:
    """Do the same as torch's."""
    if not tensor.is_cuda:
        return _broadcast(tensor, src, group, async_op)
    memory = on_host(tensor)
    return _run("broadcast", group, [tensor], [], async_op, lambda: _broadcast(memory, src, group, async_op=True))


def all_gather(outs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Do the same as torch's."""
    if not tensor.is_cuda:
        return _all_gather(outs, tensor, group, async_op)
    memory, targets = on_host(tensor), [on_host(out) for out in outs]
    return _run(
        "all_gather", group, outs, [tensor], async_op, lambda: _all_gather(targets, memory, group, async_op=True)
    )


def _of_two(name: str) -> Callable[..., Any]:
    real = getattr(dist, name)

    def call(out: torch.Tensor, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not tensor.is_cuda:
            return real(out, tensor, *args, **options)
        async_op = options.pop("async_op", False)
        group = next((each for each in args if isinstance(each, dist.ProcessGroup)), options.get("group"))
        target, memory = on_host(out), on_host(tensor)
        return _run(
            name, group, [out], [tensor], async_op, lambda: real(target, memory, *args, async_op=True, **options)
        )

    return call


def _reduce_scatter(out: torch.Tensor, tensor: torch.Tensor, op: Any = _SUM, group: Any = None, **options: Any) -> Any:
    """Gloo has no asynchronous one: all-reduce a copy, and take the rank's own part."""
    total = on_host(tensor).clone()

    def after() -> None:
        on_host(out).view(-1).copy_(total.view(-1).split(out.numel())[dist.get_rank(group)])

    start = lambda: _all_reduce(total, op, group, async_op=True)  # noqa: E731
    return _run("reduce_scatter", group, [out], [tensor], options.get("async_op", False), start, after)


dist.all_reduce = all_reduce
dist.broadcast = broadcast
dist.all_gather = all_gather
for _name in ("all_gather_into_tensor", "all_gather_single", "all_to_all_single"):
    if hasattr(dist, _name):
        setattr(dist, _name, _of_two(_name))
for _name in ("reduce_scatter_tensor", "reduce_scatter_single"):
    if hasattr(dist, _name):
        setattr(dist, _name, _reduce_scatter)
