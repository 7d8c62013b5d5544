"""How a run is shown while it goes on: the seam between what is known of it and the terminal, notebook or log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from spark_hvd.runner.watch.summary import Summary
    from spark_hvd.runner.watch.view import RunView


class Display(Protocol):
    """Shows one run. Called by one thread, the one that called ``run``: a notebook's cell belongs to it."""

    def lines(self, rank: int, stream: str, text: str) -> None:
        """Write whole lines that a rank has printed.

        Args:
            rank: Whose; -1 for a note of ours.
            stream: "out" or "err".
            text: Lines, separated by newlines, without the last newline.
        """
        ...

    def show(self, view: RunView, now: float) -> None:
        """The state of the run; called about four times a second. The display decides what of it to draw, and when.

        Args:
            view: All there is to know.
            now: ``time.monotonic()``.
        """
        ...

    def end(self, summary: Summary | None) -> None:
        """The run is over: show the summary, if there is one, and let go of the terminal. Idempotent."""
        ...
