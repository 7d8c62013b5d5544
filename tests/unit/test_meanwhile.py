"""Imports that run while Spark works."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from spark_hvd.estimators.fit.estimator import importing


def test_a_module_is_there_when_the_work_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.1)\nVALUE = 1\n")
    with importing("slow_to_import"):
        pass
    assert sys.modules.pop("slow_to_import").VALUE == 1


def test_one_that_cannot_be_imported_is_its_users_to_report() -> None:
    with importing("no_such_module_at_all"):
        worked = True
    assert worked


def test_what_the_work_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="bad row"), importing("json"):
        raise ValueError("bad row")


def test_garbage_is_collected_afterwards_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "looks_at_gc.py").write_text("import gc\nCOLLECTS = gc.isenabled()\n")
    for before in (False, True):
        (gc.enable if before else gc.disable)()
        try:
            with importing("looks_at_gc"):
                pass
            assert gc.isenabled() is before
        finally:
            gc.enable()
        assert not sys.modules.pop("looks_at_gc").COLLECTS
