"""What MPI runs leave on a host when they are cut off: shared memory by name, and folders of sockets."""

from __future__ import annotations

import contextlib
import os

from spark_hvd.runner.channel.private_sockets import SocketFolder

SHARED_MEMORY = "/dev/shm"
_SEGMENT = "mpich_shm_"
"""How MPICH names shared memory of a host's ranks. It removes the name only when all ranks have it mapped."""
FOLDER = "spark_hvd-mpi-"
"""How the folders are named in which the supervisors of a host listen."""


def sweep_segments(since: float, folder: str = SHARED_MEMORY) -> None:
    """Delete shared memory of MPICH that this user made since then and that no process has open or mapped any more.

    Errors are ignored: nothing depends on it but the room that it takes.

    Args:
        since: Seconds since the epoch: the beginning of the run that is over.
        folder: Where it lies.
    """
    with contextlib.suppress(OSError):
        made = {
            entry.path
            for entry in os.scandir(folder)
            if entry.name.startswith(_SEGMENT)
            and (info := entry.stat(follow_symlinks=False)).st_uid == os.geteuid()
            and info.st_ctime >= since
        }
        if made:
            for path in made - _in_use():
                os.unlink(path)


def sweep_folders(place: str) -> None:
    """Delete the folders of this user in which nobody listens any more."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(place):
            if entry.name.startswith(FOLDER) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError), SocketFolder(entry.path) as left:
                    left.tidy()


def _in_use() -> set[str]:
    """The files that this user's processes have mapped or open."""
    found: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            with open(f"/proc/{pid}/maps") as maps:
                found.update(line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line)
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found
