"""Gives this process simulated CUDA devices: a separate process must import it before torch.

``device.cpp`` gives torch devices, memory and kernels; this module observes it, keeps the clocks, and replaces streams,
events and other parts of ``torch.cuda`` that a build for CPUs lacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import itertools
import os
import threading
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tests.gpu_sim.clocks import Clocks

_spec = importlib.util.find_spec("torch")
assert _spec is not None
assert _spec.submodule_search_locations is not None
_libraries = f"{_spec.submodule_search_locations[0]}/lib/"
for _name in [*glob.glob(f"{_libraries}libgomp*"), f"{_libraries}libc10.so", f"{_libraries}libtorch_cpu.so"]:
    ctypes.CDLL(_name, mode=ctypes.RTLD_GLOBAL)
_device = ctypes.CDLL(os.environ["GPU_SIM_LIBRARY"])
_device.sim_stream.restype = ctypes.c_int64
_device.sim_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]

import torch  # noqa: E402

DEVICES: int = _device.sim_devices()


class Observed:
    """What this process does between two calls of :meth:`begin`.

    Attributes:
        clocks: Clocks of its streams.
        own: The devices that it may allocate memory on.
        stepping: Whether it is in the middle of steps, in which the host must not wait for a device.
        faults: Faults other than the order, one sentence each.
        pinned: Bytes of each allocation of pinned memory.
        kernels: The operators that ran, in order, with their streams.
    """

    def __init__(self) -> None:
        self.begin(set(range(DEVICES)))

    def begin(self, own: set[int]) -> None:
        """Forget everything observed."""
        self.clocks = Clocks()
        self.own = own
        self.stepping = False
        self.faults: list[str] = []
        self.pinned: list[int] = []
        self.kernels: list[tuple[str, int, int]] = []

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """Within this context the host must not wait for a device."""
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    @property
    def all_faults(self) -> list[str]:
        """Return all faults, each once."""
        return list(dict.fromkeys([*self.faults, *self.clocks.faults]))


observed = Observed()


def where() -> str:
    """Return the running line of the package, or the thread if there is none, as in autograd's own."""
    for frame in reversed(traceback.extract_stack()):
        if "/spark_hvd/" in frame.filename and "/gpu_sim/" not in frame.filename:
            return f"(spark_hvd/{frame.filename.rpartition('/spark_hvd/')[2]}:{frame.lineno}) "
    return f"({threading.current_thread().name}) "


def _ran(name: bytes, device: int, stream: int, count: int, storages: Any, writes: Any) -> None:
    observed.kernels.append((name.decode(), device, stream))
    before = len(observed.clocks.faults)
    used = [(storages[place], writes[place]) for place in range(count)]
    observed.clocks.ran(name.decode(), (device, stream), used)
    for place in range(before, len(observed.clocks.faults)):
        observed.clocks.faults[place] = where() + observed.clocks.faults[place]


def _allocated(storage: int, nbytes: int, device: int, stream: int) -> None:
    if device < 0:
        observed.pinned.append(nbytes)
        return
    observed.clocks.allocated(storage, (device, stream))
    if device not in observed.own:
        observed.faults.append(f"{where()}allocates {nbytes} bytes on cuda:{device}, which is another rank's")


def _freed(storage: int) -> None:
    observed.clocks.freed(storage)


def _host_waits(why: bytes, device: int, stream: int) -> None:
    observed.clocks.host_waits((device, stream))
    if observed.stepping:
        observed.faults.append(f"{where()}the host waits for cuda:{device} in a step: {why.decode()}")


def _recorded(device: int, stream: int) -> int:
    return observed.clocks.recorded((device, stream))


def _waits(device: int, stream: int, event: int) -> None:
    observed.clocks.waits((device, stream), event)


_INT, _LONG, _TEXT = ctypes.c_int, ctypes.c_int64, ctypes.c_char_p
_KINDS: list[tuple[str, Any, Any]] = [
    ("ran", [None, _TEXT, _INT, _LONG, _INT, ctypes.POINTER(_LONG), ctypes.POINTER(ctypes.c_bool)], _ran),
    ("allocated", [None, _LONG, _LONG, _INT, _LONG], _allocated),
    ("freed", [None, _LONG], _freed),
    ("host_waits", [None, _TEXT, _INT, _LONG], _host_waits),
    ("recorded", [_LONG, _INT, _LONG], _recorded),
    ("waits", [None, _INT, _LONG, _LONG], _waits),
]


class _Listener(ctypes.Structure):
    _fields_ = [(name, ctypes.CFUNCTYPE(*types)) for name, types, _ in _KINDS]


_listener = _Listener(*(ctypes.CFUNCTYPE(*types)(call) for _, types, call in _KINDS))
_device.sim_listen(ctypes.byref(_listener))


def stop_listening() -> None:
    """Stop listening; must be called before the interpreter ends."""
    _device.sim_listen(None)


# ---- torch.cuda ---------------------------------------------------------------------------------------------------


def _index(device: Any = None) -> int:
    if device is None:
        return int(_device.sim_device())
    if isinstance(device, int):
        return device if device >= 0 else int(_device.sim_device())
    index = torch.device(device).index
    return int(_device.sim_device()) if index is None else index


class SimulatedEvent:
    """Replaces ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._number = 0

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Do the same as CUDA's; without a stream, use the current one of the current device."""
        self._number = observed.clocks.recorded((stream or current_stream()).key)

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """As CUDA's."""
        observed.clocks.waits((stream or current_stream()).key, self._number)

    def query(self) -> bool:
        """Do the same as CUDA's; the device is never behind."""
        return True

    def synchronize(self) -> None:
        """As CUDA's."""
        observed.clocks.host_waits_for_event(self._number)
        if observed.stepping:
            observed.faults.append(f"{where()}the host waits for an event in a step")


class SimulatedStream:
    """Replaces ``torch.cuda.Stream``."""

    _numbers = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        self.device = torch.device("cuda", _index(device))
        self.priority = priority
        self.number = next(self._numbers) if number is None else number

    @property
    def key(self) -> tuple[int, int]:
        """Return the clocks' name of it."""
        return self.device.index, self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def wait_event(self, event: SimulatedEvent) -> None:
        """As CUDA's."""
        event.wait(self)

    def wait_stream(self, other: SimulatedStream) -> None:
        """As CUDA's."""
        event = SimulatedEvent()
        event.record(other)
        event.wait(self)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """As CUDA's."""
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """As CUDA's."""
        _host_waits(b"synchronize", *self.key)

    def query(self) -> bool:
        """As CUDA's."""
        return True


def current_stream(device: Any = None) -> SimulatedStream:
    """As CUDA's."""
    index = _index(device)
    return SimulatedStream(index, number=_device.sim_stream(index))


@contextlib.contextmanager
def device(index: Any) -> Iterator[None]:
    """As CUDA's."""
    before = _index()
    _device.sim_set_device(_index(index))
    try:
        yield
    finally:
        _device.sim_set_device(before)


@contextlib.contextmanager
def stream(on: SimulatedStream | None) -> Iterator[None]:
    """Do the same as CUDA's: the stream's device becomes the current one, too."""
    if on is None:
        yield
        return
    with device(on.device):
        before = _device.sim_stream(on.device.index)
        _device.sim_set_stream(*on.key)
        try:
            yield
        finally:
            _device.sim_set_stream(on.device.index, before)


def _synchronize(index: Any = None) -> None:
    observed.clocks.host_waits_for_device(_index(index))
    _host_waits(b"synchronize", _index(index), 0)


def _record_stream(tensor: torch.Tensor, on: SimulatedStream) -> None:
    observed.clocks.record_stream(tensor.untyped_storage().data_ptr(), on.key)


def _properties(index: Any = None) -> SimpleNamespace:
    place = _index(index)
    return SimpleNamespace(
        name="simulated", uuid=f"uuid-{place}", pci_domain_id=0, pci_bus_id=place, pci_device_id=0, total_memory=1 << 30
    )


_INSTEAD: dict[str, Any] = {
    "Event": SimulatedEvent,
    "Stream": SimulatedStream,
    "_lazy_init": lambda: None,
    "current_device": _index,
    "current_stream": current_stream,
    "default_stream": lambda device=None: SimulatedStream(_index(device), number=0),
    "device": device,
    "device_count": lambda: DEVICES,
    "get_device_properties": _properties,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "memory_reserved": lambda device=None: 1000 + _index(device),
    "set_device": lambda index: _device.sim_set_device(_index(index)),
    "stream": stream,
    "synchronize": _synchronize,
    "utilization": lambda device=None: _index(device),
}
for _key, _value in _INSTEAD.items():
    setattr(torch.cuda, _key, _value)
setattr(torch.Tensor, "record_stream", _record_stream)  # noqa: B010 (the method's type is another)
