"""A program of its own: imports packages and tries the store, where a crash or a hang can hurt nobody else.

The doctor sends its text to every host (`python -c`), also where spark_hvd is not installed: standard library only.
It prints one JSON object a line as soon as it knows something, so that what it said before it died is known.
"""

import importlib
import json
import os
import sys
from typing import Any


def main(arguments: dict[str, Any]) -> None:
    """Do what was asked for: ``{"packages": [names]}``, ``{"store": {...}}`` or ``{"clean": {...}}``."""
    for name in arguments.get("packages", ()):
        _say(begin=name)
        _say(name=name, **_package(name))
    if "store" in arguments:
        _try_store(**arguments["store"])
    if "clean" in arguments:
        _clean(**arguments["clean"])


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _package(name: str) -> dict[str, Any]:
    try:
        module = importlib.import_module(name)
        detail = _DETAILS[name](module) if name in _DETAILS else {}
    except ModuleNotFoundError as error:
        return {"missing": error.name == name, "error": f"ModuleNotFoundError: {error}"}
    except BaseException as error:  # an import may raise anything, SystemExit too
        return {"missing": False, "error": f"{type(error).__name__}: {error}"}
    return {"version": str(getattr(module, "__version__", "unknown")), "detail": detail}


def _torch(torch: Any) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda,
        "cuda_available": cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else [],
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }


def _mpi(mpi4py: Any) -> dict[str, Any]:
    mpi4py.rc.initialize = False  # to know the library's version takes no MPI_Init, which may hang
    mpi = importlib.import_module("mpi4py.MPI")
    return {"library": mpi.Get_library_version().strip("\0 \n").splitlines()[0]}


_DETAILS = {"torch": _torch, "mpi4py": _mpi}


def _try_store(url: str, options: dict[str, Any], folder: str, name: str, expect: str | None, leave: bool) -> None:
    """Create, write, read, rename and delete below ``url``.

    ``expect`` is a file that the driver has left there; ``leave`` keeps the one written for others to find.
    """
    import fsspec

    step = "open"
    try:
        fs, root = fsspec.core.url_to_fs(url, **options)
        below = f"{root.rstrip('/')}/{folder}"
        path, other, content = f"{below}/{name}", f"{below}/{name}.renamed", os.urandom(32)
        if not expect:
            _say(existed=bool(fs.exists(root)))
        step = "create a directory"
        fs.makedirs(below, exist_ok=True)
        step = "write"
        fs.pipe_file(path, content)
        step = "read"
        if fs.cat_file(path) != content:
            raise OSError(f"{path} has other content than was written a moment ago")
        step = "rename"
        fs.mv(path, other)
        if leave:
            fs.mv(other, path)
        else:
            step = "delete"
            fs.rm_file(other)
        if expect:
            fs.invalidate_cache()
            _say(shared=bool(fs.exists(f"{below}/{expect}")))
        _say(step=None)
    except BaseException as error:
        _say(step=step, error=f"{type(error).__name__}: {error}")


def _clean(url: str, options: dict[str, Any], folder: str, existed: bool) -> None:
    """Remove the folder of the trial, and the store's root if it came with it."""
    import fsspec

    fs, root = fsspec.core.url_to_fs(url, **options)
    fs.invalidate_cache()
    if fs.exists(f"{root.rstrip('/')}/{folder}"):
        fs.rm(f"{root.rstrip('/')}/{folder}", recursive=True)
    if not existed and fs.exists(root) and not fs.ls(root):
        fs.rmdir(root)
    _say(cleaned=True)


if __name__ == "__main__":
    main(json.loads(sys.stdin.read()))
