"""The ranks of one task, supervised together."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from spark_hvd.runner.supervise import team


class Broken:
    """A link to the hub whose socket has failed."""

    def send(self, type_: str, **fields: Any) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)


def test_a_defect_is_told_where_the_link_has_failed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def supervise(job: Any, *_: Any) -> Any:
        raise ValueError(f"the defect of {job}")

    monkeypatch.setattr(team, "supervise", supervise)
    jobs: Any = ["rank 0", "rank 1"]
    links: Any = [Broken(), Broken()]
    server: Any = None
    with pytest.raises(ValueError, match="the defect of rank 0"):
        team.supervise_all(jobs, links, server)
