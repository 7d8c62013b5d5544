"""What the caller of ``run`` sees of it: what ranks say comes in the hub's thread, and is shown in its own."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, TextIO

from spark_hvd.runner.output import LineWriter, OutputQueue

if TYPE_CHECKING:
    from spark_hvd.runner.config import RunConfig

_log = logging.getLogger(__name__)


class Monitor:
    """See the module's description; a :class:`spark_hvd.runner.hub.Listener`.

    Args:
        lines: Writes what ranks print.
    """

    def __init__(self, lines: LineWriter) -> None:
        self._lines = lines
        self._output = OutputQueue()

    # ---- the hub's thread -----------------------------------------------------------------------------------------

    def output(self, rank: int, stream: str, text: str) -> None:
        """See base class."""
        self._output.put(rank, stream, text)

    def vitals(self, message: dict[str, Any]) -> None:
        """See base class."""

    def examined(self, rank: int, message: dict[str, Any]) -> None:
        """See base class."""

    # ---- the caller's thread --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Show what is new; to be called many times a second."""
        for rank, stream, text in self._output.take():
            self._lines.write(rank, stream, text)


def make_monitor(config: RunConfig, stdout: TextIO | None, stderr: TextIO | None) -> Monitor:
    """Shows output on the streams given, else on this program's unless ``verbose`` is 0."""
    quiet = config.verbose < 1
    return Monitor(LineWriter(stdout or (None if quiet else sys.stdout), stderr or (None if quiet else sys.stderr)))
