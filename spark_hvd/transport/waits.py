"""Waits for what torch.distributed runs on the CPU, but not beyond the end of an elastic world.

Gloo loses a send whose connection ends just as it begins: nobody tells the waiting thread (in
UnboundBuffer::waitSend), and only the process group's timeout frees it. Of worlds that were cut in full traffic, one in
ten to one in thirty ended like this. So the training thread regularly checks whether its world still exists.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from spark_hvd.world.errors import CollectiveError

_LOOK = timedelta(seconds=0.25)
_GRACE = 0.5
"""Seconds after the end of its world during which a work may still end by itself, with a more precise error."""

_abort_check: Callable[[], str | None] | None = None


def set_abort_check(check: Callable[[], str | None] | None) -> None:
    """Set the function that returns why the world is over, or None while it exists; None if worlds do not end."""
    global _abort_check
    _abort_check = check


def abort_reason() -> str | None:
    """Return why the world is over; None while it exists."""
    return None if _abort_check is None else _abort_check()


def wait_for(work: Any, *groups: dist.ProcessGroup | None) -> None:
    """Wait until a work on CPU tensors has ended.

    The groups that it uses cannot be destroyed before that.

    Raises:
        CollectiveError: The world is over, and the work does not end.
        RuntimeError: A peer is gone; the backend raises this.
    """
    if _abort_check is None:
        work.wait()
        return
    give_up_at = None
    while True:
        try:
            work.wait(_LOOK)
        except RuntimeError:
            if work.is_completed():
                raise
            text = _abort_check()
            if text is None:
                continue
            give_up_at = give_up_at or time.monotonic() + _GRACE
            if time.monotonic() >= give_up_at:
                # Destroying a group waits for its works. A daemon, so that the process does not wait at its end.
                threading.Thread(target=_hold, args=[work, groups], name="spark_hvd-teardown", daemon=True).start()
                raise CollectiveError(text) from None
        else:
            return


def _hold(work: Any, groups: tuple[dist.ProcessGroup | None, ...]) -> None:
    while not work.is_completed():
        time.sleep(1.0)
