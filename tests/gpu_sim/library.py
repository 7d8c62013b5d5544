"""Compiles the simulated devices, once for each torch: ``python -m tests.gpu_sim.library`` does it before the tests."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
BUILD = Path(__file__).resolve().parents[2] / "build"


def compiler() -> str | None:
    """Return the path of a C++ compiler, if there is one."""
    return shutil.which("c++") or shutil.which("g++")


def compiled(by: str) -> Path:
    """Return the compiled devices."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    includes = [f"-isystem{root / 'include' / folder}" for folder in ("", "torch/csrc/api/include")]
    command = [by, "-shared", "-fPIC", "-O0", "-std=c++20", *includes, str(SOURCE)]
    command += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    made_of = "\n".join([*command, importlib.metadata.version("torch"), SOURCE.read_text()])
    library = BUILD / f"gpu_sim-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(unfinished)], check=True, timeout=550)
        unfinished.replace(library)
    return library


if __name__ == "__main__" and (found := compiler()) is not None:
    compiled(found)
