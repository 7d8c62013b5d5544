"""The fork server's promise that a rank can be ended from the moment on in which there is one."""

from __future__ import annotations

import os
import select
import signal

from spark_hvd.runner.supervise.processes import fork_server


def test_a_rank_that_has_just_been_forked_can_be_killed() -> None:
    """It then may not yet have come so far as to make a process group of its own."""
    server = fork_server({}, os.getpid())
    for _ in range(50):
        process = server.spawn(dict(os.environ), 60.0)
        process.signal_group(signal.SIGKILL)
        try:
            assert select.select([process.status_fd], [], [], 5.0)[0], "it lives on"
            assert os.read(process.status_fd, 256) == b'{"exitcode": -9}\n'
        finally:
            process.close()
