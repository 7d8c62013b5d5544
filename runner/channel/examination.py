"""What a closer look at one rank's process has found, as a message between task and driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found.

    Attributes:
        cpu: Processors used by the rank and all that it has started, over a second: 1.0 is one core.
        status: Of its process, in psutil's words: "running", "sleeping", "stopped", "disk-sleep" ...
        stacks: The Python stacks of its threads; empty if it wrote none, as when it is stopped.
    """

    cpu: float
    status: str
    stacks: str

    def to_message(self) -> dict[str, Any]:
        """Plain data that JSON can carry."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Examination:
        """What :meth:`to_message` made."""
        return cls(message["cpu"], message["status"], message["stacks"])
