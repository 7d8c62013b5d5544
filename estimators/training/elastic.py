"""What an elastic fit goes on from when its ranks change: the content of a checkpoint, in the memory of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import spark_hvd.torch as hvd

COMMIT_EVERY = 16
"""Steps of the optimizer from commit to commit, where the parameters of a fit say nothing."""


class FitState(hvd.elastic.TorchState):
    """The state of a fit. Whoever goes on from it does what whoever goes on from that checkpoint does.

    Attributes:
        content: Of a checkpoint; None where none was committed yet.
        optimizer: A torch optimizer before whose steps tensors are still those of the last commit, if there is one.
            They are copied meanwhile.
    """

    content: dict[str, Any] | None
    optimizer: Any

    def __init__(self) -> None:
        super().__init__(content=None)

    def put(self, content: Mapping[str, Any], last: bool) -> None:
        """Commit a content; collective. The ``last`` one of a fit is kept, and lets no ranks join or leave any more.

        Raises:
            HostsUpdatedInterrupt: the members are to change.
            CollectiveError: a peer or the network failed.
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
