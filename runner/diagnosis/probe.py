"""A program that says what one machine is like, as one JSON object: its packages, its resources, the store from there.

The doctor sends its text to every host (`python -c`), also where spark_hvd is not installed or is another version:
standard library only. Imports and the store may crash or hang, so each is tried in a child of this program.
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
    """Run this program in a process of its own.

    ``seconds`` is the time for all imports together, and as much for the store.

    Returns:
        Its answer; ``{"error": ...}`` where there is none.
    """
    # -c looks into the working directory first, which others may write to.
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
    """Answer what was asked for.

    Args:
        arguments: ``packages`` to import; ``dirs`` beside the temporary one whose disks matter, for the facts of this
            machine; ``store``, a trial of it, or ``clean``, the end of one; ``claim``, a name: of the processes of this
            machine that come with one name at a time, the first one answers; ``seconds``.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        if "claim" in arguments:
            try:  # an abstract name goes with its process, and leaves no file
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
                found, ending = isolated(lambda: act(**arguments[name]), seconds)  # noqa: B023 - called now
                answer[name] = found or {"failed_step": "answer", "error": f"the attempt {ending}"}
        return answer


def isolated(act: Callable[[], Any], seconds: float) -> tuple[Any, str]:
    """Call a function in a child process; whatever it starts is killed when ``seconds`` are over.

    Returns:
        Its value, if it came to one, and how the child ended.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()  # so that what it starts can be ended with it
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # packages print what they like when they are imported
            os.dup2(silence, stream)
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
    """What comes of importing packages, in this order; ``seconds`` are for all of them together."""
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + seconds
    for name in names:
        if (left := deadline - time.monotonic()) <= 0:
            found[name] = {"error": f"not tried: the imports before took {seconds:.0f} s"}
            continue
        package, ending = isolated(lambda: _package(name), left)  # noqa: B023 - called now
        found[name] = package or {"error": f"importing it {ending}"}
    return found


def _package(name: str) -> dict[str, Any]:
    try:
        module = importlib.import_module(name)
        detail = _DETAILS[name](module) if name in _DETAILS else {}
    except ModuleNotFoundError as error:
        return {"missing": error.name == name, "error": f"ModuleNotFoundError: {error}"}
    except BaseException as error:  # an import may raise anything, SystemExit too
        return {"error": f"{type(error).__name__}: {error}"}
    return {"version": str(getattr(module, "__version__", "unknown")), "detail": detail}


def _torch(torch: Any) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    why = None
    if torch.version.cuda and not cuda:
        try:
            torch.cuda.init()
        except Exception as error:  # no driver, or one that is too old: in torch's own words
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
    mpi4py.rc.initialize = False  # to know the library's version takes no MPI_Init, which may hang
    mpi = importlib.import_module("mpi4py.MPI")
    return {"library": mpi.Get_library_version().strip("\0 \n").splitlines()[0]}


_DETAILS = {"torch": _torch, "mpi4py": _mpi}


def resources(dirs: list[str]) -> dict[str, Any]:
    """What this machine or container has. Sizes are in bytes."""
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
    """The same in all processes of one machine or container, and another in each other one."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [_text("/proc/sys/kernel/random/boot_id")[:8], str(os.stat("/proc/self/ns/net").st_ino)]
    return "/".join(parts)


def machine_of(key: str) -> str:
    """The same for all containers of one machine: as far as they tell, by the start of their kernel."""
    parts = key.split("/")
    return parts[1] if len(parts) == 3 else key


def disk(path: str) -> dict[str, Any]:
    """Size and free space of a directory's file system, or why no file can be written there."""
    try:
        usage = shutil.disk_usage(path)
        with tempfile.TemporaryFile(dir=path):
            return {"path": path, "total": usage.total, "free": usage.free}
    except OSError as error:
        return {"path": path, "error": f"{type(error).__name__}: {error.strerror or error}"}


def _cores() -> float:
    """Cores that this process may use: the affinity mask or the container's quota, whichever is less."""
    # A driver elsewhere than on Linux has no affinity mask.
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):
        quota, period = _text("/sys/fs/cgroup/cpu.max").split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores


def _memory() -> tuple[int, int]:
    """Memory of the machine or container in bytes: in all, and available."""
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
    """Create, write, read, rename and delete below ``url``.

    ``expect`` is a file that the driver has left there; ``leave`` keeps the one written for others to find.
    """
    step, found = "open", {}
    try:
        import fsspec

        fs, root = fsspec.core.url_to_fs(url, **options)
        below = f"{root.rstrip('/')}/{folder}"
        path, other, content = f"{below}/{name}", f"{below}/{name}.renamed", os.urandom(32)
        found["existed"] = bool(fs.exists(root))
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
            found["shared"] = bool(fs.exists(f"{below}/{expect}"))
        return found
    except BaseException as error:
        return {**found, "failed_step": step, "error": f"{type(error).__name__}: {error}"}


def _clean(url: str, options: dict[str, Any], folder: str, remove_root: bool) -> dict[str, Any]:
    """Remove the folder of the trial, and the store's root if it came with it."""
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
