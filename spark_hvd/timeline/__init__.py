"""What happened when: recorded, gathered, read, drawn. ``python -m spark_hvd.timeline summary FILE`` reads it.

May import world. Doors: recorder (for ranks), command. Names are loaded on first use: a rank only records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_hvd.timeline.command import describe, main, read_trace

__all__ = ["describe", "main", "read_trace"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from spark_hvd.timeline import command

        return getattr(command, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
