"""The timeline's writer accepts what members send: it drops and reports non-events, and writes the rest."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from spark_hvd.timeline.collector import Collector

GOOD: list[Any] = ["X", "loss", "ALLREDUCE", 10, 20, None]
ODD: dict[str, Any] = {
    "short": ["X", "loss"],
    "kind": ["Z", "loss", "ALLREDUCE", 10, 20, None],
    "text": ["X", "loss", "ALLREDUCE", "10", "20", None],
    "row": ["i", ["loss"], "RANK_READY", 10, None],
    "huge": ["i", "loss", "RANK_READY", 10**400, None],
    "arguments": ["i", "loss", "RANK_READY", 10, [1]],
    "nothing": None,
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_what_is_no_event(odd: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector(str(tmp_path / "timeline.json"), ["alpha", "alpha"])
    for _ in range(2):
        collector.add(1, 0, [odd, GOOD])
    collector.add(0, 0, [GOOD])
    collector.done(1)
    with caplog.at_level(logging.WARNING, "spark_hvd"):
        collector.close()
    entries = json.loads((tmp_path / "timeline.json").read_text())
    assert [entry["pid"] for entry in entries if entry["ph"] != "M"] == [1, 1, 0]
    assert caplog.messages == [f"The timeline {collector.path} lacks events that rank 1 sent: 1 of 2 were malformed."]


def test_what_is_no_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector(str(tmp_path / "timeline.json"), ["alpha", "alpha"])
    collector.add(1, None, [GOOD])  # type: ignore[arg-type]
    collector.add(0, 0, [GOOD])
    collector.done(1)
    collector.close()
    entries = json.loads((tmp_path / "timeline.json").read_text())
    assert [entry["pid"] for entry in entries if entry["ph"] != "M"] == [0]
    assert "lacks events that rank 1 sent: TypeError" in caplog.text
