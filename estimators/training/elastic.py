"""The state from which an elastic fit continues when its ranks change: a checkpoint in the memory of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import spark_hvd.torch as hvd

COMMIT_EVERY = 16
"""Default number of optimizer steps between commits."""


class FitState(hvd.elastic.TorchState):
    """The state of a fit. Continuing from it equals continuing from its checkpoint.

    Attributes:
        content: Content of a checkpoint; None before the first commit.
        optimizer: A torch optimizer, if there is one. Until its next step, tensors are still those of the last commit,
            and are copied meanwhile.
    """

    content: dict[str, Any] | None
    optimizer: Any

    def __init__(self) -> None:
        super().__init__(content=None)

    def put(self, content: Mapping[str, Any], last: bool) -> None:
        """Commit a checkpoint's content. Collective. After the ``last`` commit of a fit, no rank joins or leaves.

        Raises:
            HostsUpdatedInterrupt: the members are about to change.
            CollectiveError: A peer or the network failed.
        """
        self.content = dict(content)
        if last:
            self.save()
        else:
            self.commit()

    def _content(self) -> dict[str, Any]:
        return {"content": self.content}

    def _renew(self) -> None:
        super()._renew()
        self.optimizer = None  # the next generation makes its own
