"""A program that reports facts about one machine as a JSON object: packages, resources, and access to the store.

The doctor sends the program's text to every host (`python -c`), even if spark_hvd is missing there or has another
version, so it uses the standard library only. Imports and the store may crash or hang, so a child process tries each.
"""

import contextlib
import importlib
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


def ask(program: str, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run this program in a new process.

    ``seconds`` limits all imports together, and then, separately, the trial of the store.

    Returns:
        The program's answer; ``{"error": ...}`` if it gave none.
    """
    # With -c, Python searches the working directory first, to which others may be able to write.
    only_the_path = "import sys; sys.path = [entry for entry in sys.path if entry]\n"
    process = subprocess.Popen(
        [sys.executable, "-c", only_the_path + program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)},
    )
    try:
        out, _ = process.communicate(json.dumps({**arguments, "seconds": seconds}).encode(), 2 * seconds + 20)
        answer: dict[str, Any] = json.loads(out)
        return answer
    except (subprocess.TimeoutExpired, ValueError) as error:
        process.kill()
        process.communicate()
        return {"error": f"the doctor's program ended with code {process.returncode}: {type(error).__name__}"}


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Collect the facts that were asked for.

    Args:
        arguments: ``packages`` lists packages to import. ``dirs`` asks for this machine's resources, with the disks of
            these directories besides the temporary one. ``store`` has the arguments of a trial of the store, ``clean``
            those for its cleanup. ``claim`` is a name: if several processes of this machine have the same name at a
            time, only the first answers. ``seconds`` is the time limit.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        if "claim" in arguments:
            try:  # an abstract name disappears with its process and leaves no file
                claim.bind(f"\0{arguments['claim']}")
            except OSError:
                return {}
        seconds = arguments["seconds"]
        answer: dict[str, Any] = {}
        if "packages" in arguments:
            answer["packages"] = packages(arguments["packages"], seconds)
        if "dirs" in arguments:
            answer |= resources(arguments["dirs"])
        for name, act in (("store", _try_store), ("clean", _clean)):
            if name in arguments:
                result, ending = isolated(lambda: act(**arguments[name]), seconds)  # noqa: B023 - called now
                answer[name] = result or {"failed_step": "answer", "error": f"the attempt {ending}"}
        return answer


def isolated(act: Callable[[], Any], seconds: float) -> tuple[Any, str]:
    """Call a function in a child process, and kill it and all processes that it started after ``seconds``.

    Returns:
        The function's value, or None if it gave none, and how the child ended.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()  # so that the processes that it starts can be killed with it
        devnull = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # packages may print anything when they are imported
            os.dup2(devnull, stream)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(act()).encode())
        os._exit(0)
    os.close(writer)
    deadline, data, over = time.monotonic() + seconds, b"", False
    answers = select.poll()
    answers.register(reader, select.POLLIN)
    while not over and answers.poll(max(deadline - time.monotonic(), 0) * 1000):
        piece = os.read(reader, 1 << 16)
        data, over = data + piece, not piece
    os.close(reader)
    if not over:
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not over:
        return None, f"took more than {seconds:.0f} s"
    ending = f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return json.loads(data), ending
    return None, ending


def packages(names: list[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Import packages in this order and report on each; ``seconds`` limits all imports together."""
    results: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + seconds
    for name in names:
        if (left := deadline - time.monotonic()) <= 0:
            results[name] = {"error": f"not tried: the imports before it took {seconds:.0f} s"}
            continue
        package, ending = isolated(lambda: _package(name), left)  # noqa: B023 - called now
        results[name] = package or {"error": f"importing it {ending}"}
    return results


def _package(name: str) -> dict[str, Any]:
    try:
        module = importlib.import_module(name)
        detail = _DETAILS[name](module) if name in _DETAILS else {}
    except ModuleNotFoundError as error:
        return {"missing": error.name == name, "error": f"ModuleNotFoundError: {error}"}
    except BaseException as error:  # an import may raise anything, even SystemExit
        return {"error": f"{type(error).__name__}: {error}"}
    return {"version": str(getattr(module, "__version__", "unknown")), "detail": detail}


def _torch(torch: Any) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    why = None
    if torch.version.cuda and not cuda:
        try:
            torch.cuda.init()
        except Exception as error:  # torch says whether the driver is missing or too old
            why = str(error).strip().partition("\n")[0]
    pairs = [(one, other) for other in range(torch.cuda.device_count() if cuda else 0) for one in range(other)]
    return {
        "why": why,
        "no_peers": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
        "cuda": torch.version.cuda,
        "cuda_available": cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else [],
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }


def _mpi(mpi4py: Any) -> dict[str, Any]:
    mpi4py.rc.initialize = False  # the library's version is available without MPI_Init, which may hang
    mpi = importlib.import_module("mpi4py.MPI")
    return {"library": mpi.Get_library_version().strip("\0 \n").splitlines()[0]}


_DETAILS = {"torch": _torch, "mpi4py": _mpi}


def resources(dirs: list[str]) -> dict[str, Any]:
    """Return the resources of this machine or container. Sizes are in bytes."""
    memory, free = _memory()
    return {
        "key": host_key(),
        "name": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": _cores(),
        "memory": memory,
        "memory_free": free,
        "shm": disk("/dev/shm"),
        "disks": [disk(path) for path in dict.fromkeys([tempfile.gettempdir(), *filter(None, dirs)])],
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def host_key() -> str:
    """Return a key that identifies this machine or container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [_text("/proc/sys/kernel/random/boot_id")[:8], str(os.stat("/proc/self/ns/net").st_ino)]
    return "/".join(parts)


def machine_of(key: str) -> str:
    """Return the part of a host key that all containers of one machine share: the boot ID of their kernel."""
    parts = key.split("/")
    return parts[1] if len(parts) == 3 else key


def disk(path: str) -> dict[str, Any]:
    """Return the size and free space of a directory's file system, or why no file can be written there."""
    try:
        usage = shutil.disk_usage(path)
        with tempfile.TemporaryFile(dir=path):
            return {"path": path, "total": usage.total, "free": usage.free}
    except OSError as error:
        return {"path": path, "error": f"{type(error).__name__}: {error.strerror or error}"}


def _cores() -> float:
    """Return the cores that this process may use: the affinity mask or the container's quota, whichever is less."""
    # There is no affinity mask outside of Linux, where a driver may run.
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):
        quota, period = _text("/sys/fs/cgroup/cpu.max").split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores


def _memory() -> tuple[int, int]:
    """Return the total and the available memory of the machine or container, in bytes."""
    amounts = {"MemTotal": 0, "MemAvailable": 0}
    with contextlib.suppress(OSError):
        for line in _text("/proc/meminfo").splitlines():
            name, _, rest = line.partition(":")
            if name in amounts:
                amounts[name] = int(rest.split()[0]) << 10
    total, free = amounts["MemTotal"], amounts["MemAvailable"]
    with contextlib.suppress(OSError, ValueError):
        limit = int(_text("/sys/fs/cgroup/memory.max"))
        used = int(_text("/sys/fs/cgroup/memory.current"))
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return total, free


def _text(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def _try_store(
    url: str, options: dict[str, Any], folder: str, name: str, expect: str | None, leave: bool
) -> dict[str, Any]:
    """Create, write, read, rename and delete files below ``url``.

    ``expect`` names a file that the driver has left there. With ``leave``, the file stays for others to find.
    """
    step, result = "open", {}
    try:
        import fsspec

        fs, root = fsspec.core.url_to_fs(url, **options)
        below = f"{root.rstrip('/')}/{folder}"
        path, other, content = f"{below}/{name}", f"{below}/{name}.renamed", os.urandom(32)
        result["existed"] = bool(fs.exists(root))
        step = "create a directory"
        fs.makedirs(below, exist_ok=True)
        step = "write"
        fs.pipe_file(path, content)
        step = "read"
        if fs.cat_file(path) != content:
            raise OSError(f"{path} does not have the content that was just written")
        step = "rename"
        fs.mv(path, other)
        if leave:
            fs.mv(other, path)
        else:
            step = "delete"
            fs.rm_file(other)
        if expect:
            fs.invalidate_cache()
            result["shared"] = bool(fs.exists(f"{below}/{expect}"))
        return result
    except BaseException as error:
        return {**result, "failed_step": step, "error": f"{type(error).__name__}: {error}"}


def _clean(url: str, options: dict[str, Any], folder: str, remove_root: bool) -> dict[str, Any]:
    """Remove the folder of the trial and, with ``remove_root``, the store's root if it is empty."""
    import fsspec

    fs, root = fsspec.core.url_to_fs(url, **options)
    fs.invalidate_cache()
    if fs.exists(f"{root.rstrip('/')}/{folder}"):
        fs.rm(f"{root.rstrip('/')}/{folder}", recursive=True)
    if remove_root and fs.exists(root) and not fs.ls(root):
        fs.rmdir(root)
    return {"cleaned": True}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.stdin.read()))))
