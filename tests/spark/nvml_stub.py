"""A machine with five GPUs, as NVML describes it: imported into fork servers, so that torch sees them in ranks.

torch itself reads CUDA_VISIBLE_DEVICES and asks NVML; only the answers of NVML and the driver are made up. The first
two GPUs are those that Spark calls 0 and 1, two have UUIDs, the last is divided into slices.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

UUIDS = ["GPU-n0", "GPU-n1", "GPU-a1", "GPU-b2", "GPU-sliced"]
chosen = [0]


def visible() -> list[str]:
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",") if name]


def board(number: int) -> int:
    """Return the GPU behind a rank's device."""
    name = visible()[number]
    return 4 if name.startswith("MIG-") else int(name) if name.isdigit() else UUIDS.index(name)


def count() -> int:
    """Count like the driver: of several slices it gives a process one."""
    return min(1, len(visible())) if "MIG-" in "".join(visible()) else torch.cuda._device_count_nvml()


def properties(number: int) -> SimpleNamespace:
    place = board(number)
    return SimpleNamespace(uuid=UUIDS[place], pci_domain_id=0, pci_bus_id=place, pci_device_id=0)


nvml = SimpleNamespace(
    nvmlInit=lambda: None,
    NVMLError_DriverNotLoaded=type("NVMLError_DriverNotLoaded", (Exception,), {}),
    nvmlDeviceGetHandleByIndex=lambda number: number,
    nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=10 * handle + 10),
)
sys.modules["pynvml"] = nvml  # type: ignore[assignment]
instead: dict[Any, dict[str, Any]] = {
    torch._C: {"_cuda_getDeviceCount": count},
    torch.cuda: {
        "_HAS_PYNVML": True,
        "_is_compiled": lambda: True,
        "_raw_device_count_nvml": lambda: len(UUIDS),
        "_raw_device_uuid_nvml": lambda: UUIDS,
        "get_device_properties": properties,
        "memory_reserved": lambda number: 1000 if number == chosen[-1] else 0,
        "pynvml": nvml,
        "set_device": chosen.append,
    },
}
for module, values in instead.items():
    for key, value in values.items():
        setattr(module, key, value)
