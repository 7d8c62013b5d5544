"""Unix sockets that only this user's processes in the same container can reach, with a check of their other ends.

The sockets are in a directory of mode 0700, in memory if the system has a place for that. The kernel shows everybody
the names under which sockets were bound (/proc/net/unix), so we bind them under random names and then rename them.

MPI's shim also runs this file, without site-packages, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
BACKLOG = 64
_MOST_TRIES = 100  # to lock a folder that others remove after use; even two failures in a row are rare
_PLACES = ("/dev/shm", "/tmp")  # the same for all executors of a host, while each may have another TMPDIR


def is_ours(connection: socket.socket) -> bool:
    """Tell whether the other end of a Unix socket is a process of this user in this container.

    The user ID alone is not enough if containers share a network or a directory, because each may have its own root.
    """
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    # PID 0 is a process that our PID namespace does not know.
    return uid == os.geteuid() and pid != 0 and namespaces(str(pid)) == namespaces("self")


def namespaces(process: str) -> list[str | None]:
    """Return the mount and user namespaces of a process; None for each that is hidden or that the kernel lacks."""
    found: list[str | None] = []
    for kind in ("mnt", "user"):
        try:
            found.append(os.readlink(f"/proc/{process}/ns/{kind}"))
        except OSError:
            found.append(None)
    return found


class SocketFolder:
    """A directory for sockets, which is locked until the with statement ends; keep that short.

    Raises:
        OSError: It cannot be made or locked, or others may write to it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        for _ in range(_MOST_TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:  # its last user has just removed it
                continue
            try:
                info = os.fstat(self._fd)
                if info.st_uid != os.geteuid() or info.st_mode & 0o077:
                    raise PermissionError(
                        f"{path} must be a directory of user {os.geteuid()} with mode 0700, but it is one of user "
                        f"{info.st_uid} with mode {info.st_mode & 0o7777:04o}: remove it"
                    )
                fcntl.flock(self._fd, fcntl.LOCK_EX)  # after the check, because others could lock their own forever
                if os.path.samestat(info, os.lstat(path)):
                    return
            except FileNotFoundError:
                pass
            except OSError:
                os.close(self._fd)
                raise
            os.close(self._fd)
        raise OSError(
            f"{path} was replaced by another directory {_MOST_TRIES} times while we locked it. Next: see which program "
            "removes it, or which file system it is on"
        )

    @classmethod
    def named(cls, name: str) -> SocketFolder:
        """Open the directory of a name, which is the same for all processes of a container.

        Raises:
            OSError: There is no place for it.
        """
        import tempfile

        for place in _PLACES:
            with contextlib.suppress(OSError):
                return cls(os.path.join(place, name))
        return cls(os.path.join(tempfile.gettempdir(), name))

    def __enter__(self) -> SocketFolder:
        return self

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing is not enough if another thread has forked a process meanwhile
        os.close(self._fd)

    def listen(self, name: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """Return a socket that listens here, and replace a dead one of that name.

        Raises:
            OSError: Another process listens there, or this file system has no sockets.
        """
        if self._alive(name):
            raise OSError(errno.EADDRINUSE, "another process listens there", os.path.join(self.path, name))
        listener, bound = socket.socket(socket.AF_UNIX, kind), os.urandom(8).hex()
        try:
            listener.bind(self._address(bound))
            listener.listen(BACKLOG)
            os.rename(bound, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            listener.close()
            raise
        return listener

    def connect(self, name: str) -> socket.socket | None:
        """Connect to the listener of a name; return None if there is none."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._address(name))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        return connection

    def tidy(self) -> None:
        """Remove the sockets of processes that have ended, then the directory if nothing is left in it."""
        for name in os.listdir(self._fd):
            with contextlib.suppress(OSError):  # a file that is not a socket is not ours
                if not self._alive(name):
                    os.unlink(name, dir_fd=self._fd)
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _alive(self, name: str) -> bool:
        """Tell whether a process has this socket, without the process noticing."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            try:
                asking.connect(self._address(name))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
            except OSError as error:
                if error.errno != errno.EPROTOTYPE:  # which means that a socket of another kind is alive
                    raise
        return True

    def _address(self, name: str) -> str:
        # A socket's address has room for 107 bytes only, which some paths exceed.
        return f"/proc/self/fd/{self._fd}/{name}"
