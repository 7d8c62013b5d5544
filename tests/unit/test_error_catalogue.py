"""docs/errors.md has an entry for every error class of the three packages, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import spark_hvd.runner
import spark_hvd.torch

ROOT = Path(__file__).parents[2]
PACKAGES = ("spark_hvd", "runner", "estimators")
PAGE = (ROOT / "docs" / "errors.md").read_text()
PARTS = ("Cause", "Message", "Remedy")


def error_classes() -> set[str]:
    """Read, not imported: some modules need packages that are missing here. The linter checks the names (N818)."""
    texts = [file.read_text() for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {
        name for text in texts for name in re.findall(r"^ *class ([^\W_]\w*(?:Error|Interrupt))\b", text, re.MULTILINE)
    }


def entries() -> dict[str, str]:
    found = re.split(r"^### `(\w+)`$", PAGE, flags=re.MULTILINE)[1:]
    names = found[::2]
    assert len(names) == len(set(names)), "twice"
    return dict(zip(names, found[1::2], strict=True))


def test_every_error_has_an_entry_and_every_entry_an_error() -> None:
    classes = error_classes()
    assert {"RankFailedError", "MismatchError", "DataError", "HostsUpdatedInterrupt", "NewerFormatError"} <= classes
    assert set(entries()) == classes


def test_every_entry_tells_cause_message_and_remedy() -> None:
    for name, text in entries().items():
        body = text.split("\n## ")[0]
        for part in PARTS:
            said = re.search(rf"^\*\*{part}\*\*: (.+)", body, flags=re.MULTILINE)
            assert said is not None, f"{name} lacks its {part.lower()}"
            assert len(said[1]) > 5, f"{name}: {part}"


def test_errors_of_the_public_faces_are_in_their_parts() -> None:
    parts = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
    for name in spark_hvd.runner.__all__:
        if name.endswith("Error"):
            assert f"### `{name}`" in parts["Errors of a run"], name
    for name in spark_hvd.torch.__all__:
        if name.endswith("Error") and name != "HorovodInternalError":
            assert f"### `{name}`" in parts["Errors inside fn"], name


def test_links_within_the_page_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", PAGE, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= anchors
