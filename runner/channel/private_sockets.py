"""Unix sockets that only this user's processes in the same container can reach, with a check of their other ends.

They lie in a directory of mode 0700, in memory where the system has a place for that. The kernel shows the names under
which sockets were bound to everybody (/proc/net/unix), so they are bound under random ones and then renamed.

MPI's shim runs this file too, without site-packages: it imports nothing but the standard library.
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
_MOST_TRIES = 100  # to lock a folder that others remove when they have used it; two in a row are rare
_PLACES = ("/dev/shm", "/tmp")  # the same for all executors of a host, who may have a TMPDIR each


def is_ours(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this user, with our files and our users.

    The same number of a user means little where containers share a network or a directory: each may have its root.
    """
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    # Number 0 is a process that our PID namespace does not know.
    return uid == os.geteuid() and pid != 0 and namespaces(str(pid)) == namespaces("self")


def namespaces(process: str) -> list[str | None]:
    """The mount and user namespaces of a process; None for what cannot be seen, or what the kernel does not have."""
    found: list[str | None] = []
    for kind in ("mnt", "user"):
        try:
            found.append(os.readlink(f"/proc/{process}/ns/{kind}"))
        except OSError:
            found.append(None)
    return found


class SocketFolder:
    """A directory for sockets, locked until it is left; use it in a with statement, and not for long.

    Raises:
        OSError: It cannot be made or locked, or others may write into it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        for _ in range(_MOST_TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:  # whoever used it last has just removed it
                continue
            try:
                info = os.fstat(self._fd)
                if info.st_uid != os.geteuid() or info.st_mode & 0o077:
                    raise PermissionError(
                        f"{path} is to be a directory of user {os.geteuid()} with mode 0700, and it is one of user "
                        f"{info.st_uid} with mode {info.st_mode & 0o7777:04o}: remove it"
                    )
                fcntl.flock(self._fd, fcntl.LOCK_EX)  # only now: others could hold a lock on theirs for ever
                if os.path.samestat(info, os.lstat(path)):
                    return
            except FileNotFoundError:
                pass
            except OSError:
                os.close(self._fd)
                raise
            os.close(self._fd)
        raise OSError(
            f"{path} was another directory once it was locked, {_MOST_TRIES} times. Expected that it stays. Next: "
            "see which program removes it, or what the file system below it is"
        )

    @classmethod
    def named(cls, name: str) -> SocketFolder:
        """The directory of a name: the same one for all processes that look for it in the same container.

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
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # a process that another thread has forked meanwhile has it open, too
        os.close(self._fd)

    def listen(self, name: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket that listens here, replacing a dead one of that name.

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
        """A connection to the listener of a name; None if there is none."""
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
            with contextlib.suppress(OSError):  # what is there and no socket was put there by somebody else
                if not self._alive(name):
                    os.unlink(name, dir_fd=self._fd)
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _alive(self, name: str) -> bool:
        """Whether a process has this socket; it does not notice that it is asked about."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            try:
                asking.connect(self._address(name))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
            except OSError as error:
                if error.errno != errno.EPROTOTYPE:  # a living one, of another kind than ours
                    raise
        return True

    def _address(self, name: str) -> str:
        # A socket's address has room for 107 bytes, and paths are longer in some places.
        return f"/proc/self/fd/{self._fd}/{name}"
