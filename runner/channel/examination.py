"""The result of examining a rank's process, as a message between task and driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of an examination.

    Attributes:
        cpu: Cores used by the rank and its child processes, over a second: 1.0 is one core.
        status: Status of its process in psutil's words: "running", "sleeping", "stopped", "disk-sleep" ...
        stacks: The Python stacks of its threads; empty if it wrote none, for example because it is stopped.
    """

    cpu: float
    status: str
    stacks: str

    def to_message(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Examination:
        """The inverse of :meth:`to_message`."""
        return cls(message["cpu"], message["status"], message["stacks"])
