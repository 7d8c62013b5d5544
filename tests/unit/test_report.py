"""The report as text and JSON."""

from __future__ import annotations

import json

from spark_hvd.runner.diagnosis.report import Finding, Level, Report

FINE = Finding("slots", Level.OK, "4 available")
BAD = Finding("disk <1>", Level.ERROR, "no space & no hope " + "word " * 40, "--conf a=b\nrm -r /x   # " + "y " * 60)
ODD = Finding("clock", Level.WARNING, "late", "chronyc makestep")


def test_the_table_is_aligned_and_keeps_to_its_width() -> None:
    lines = Report("num_proc=4 on yarn", (FINE, BAD, ODD), 1.26).table(80).splitlines()
    assert lines[0] == "spark_hvd doctor: num_proc=4 on yarn"
    assert lines[2] == "OK       slots     4 available"
    assert max(map(len, lines)) <= 80
    assert {line.index("->") for line in lines if "->" in line} == {19}
    assert "                   -> --conf a=b" in lines
    assert lines[-1] == "1 OK, 1 warning, 1 error in 1.3 s. A run will not work yet: see disk <1>."


def test_no_setting_is_broken_in_two() -> None:
    remedy = (
        "--conf spark.executor.resource.gpu.discoveryScript=/opt/spark/examples/src/main/scripts/getGpusResources.sh"
    )
    lines = Report("x", (Finding("c", Level.ERROR, "f", remedy),), 0).table(50).splitlines()
    assert any(line.endswith("getGpusResources.sh") and "discoveryScript=" in line for line in lines)


def test_ok_means_no_errors() -> None:
    assert Report("x", (FINE, ODD), 0).ok
    assert str(Report("x", (FINE, ODD), 0)).endswith("A run will work.")
    report = Report("x", (FINE, BAD, ODD), 0)
    assert (report.ok, report.errors, report.warnings) == (False, [BAD], [ODD])


def test_json() -> None:
    data = json.loads(Report("s", (FINE, BAD), 1.23456).to_json())
    assert (data["ok"], data["subject"], data["seconds"]) == (False, "s", 1.235)
    assert data["findings"][0] == {"check": "slots", "level": "OK", "found": "4 available", "remedy": ""}
