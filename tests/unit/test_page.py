"""The page of a run: which requests it answers, what it draws, and that it loads and runs nothing foreign."""

from __future__ import annotations

import json
import re
import sys
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.runner.config import PageAddress, RunConfig
from spark_hvd.runner.launch.monitor import make_monitor
from spark_hvd.runner.watch.display import page
from spark_hvd.runner.watch.display.serve import PageRequest, refusal
from spark_hvd.runner.watch.history import RunHistory
from tests.trained_ranks import record, trained

TOKEN = "q7h3"
HOSTILE = "<img src=x onerror=alert(1)>\x1b]0;x\x07"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, None), (False, None), ("0", None), ("off", None), ("No", None), ("false", None),
        (True, PageAddress()), ("1", PageAddress()), ("on", PageAddress()), ("YES", PageAddress()),
        ("8080", PageAddress("127.0.0.1", 8080)),
        ("8080,hub.example.com", PageAddress("127.0.0.1", 8080, ("hub.example.com",))),
        ("127.0.0.1:8080", PageAddress("127.0.0.1", 8080)),
        (":8080", PageAddress("127.0.0.1", 8080)),
        ("0.0.0.0", PageAddress("0.0.0.0", 0)),
        ("[::1]:80, Hub.example.com", PageAddress("::1", 80, ("hub.example.com",))),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_an_address(asked: Any, expected: PageAddress | None) -> None:
    assert PageAddress.parse(asked) == expected


@pytest.mark.parametrize("asked", ["a b", "127.0.0.1:http", "127.0.0.1:70000", "70000", "127.0.0.1:80,", "http://x/"])
def test_what_is_no_address_is_an_error_that_says_so(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=re.escape(f"page={asked!r}: expected True, or HOST:PORT")):
        RunConfig(page=asked)
    monkeypatch.setenv("SPARK_HVD_PAGE", asked)
    with pytest.raises(ValueError, match=re.escape(f"SPARK_HVD_PAGE={asked!r}: expected")):
        make_monitor(RunConfig(), lambda: None, 2)
    with pytest.raises(TypeError, match=r"page=8080: expected True, False, or text"):
        RunConfig(page=8080)  # type: ignore[arg-type]


def asked(path: str = f"/{TOKEN}/run?after=3", method: str = "GET", **headers: str) -> PageRequest:
    named = {"Host": "127.0.0.1:8080", **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return PageRequest.parse(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode())


def test_a_request_is_read_behind_any_prefix() -> None:
    for prefix in ("", "/user/me/proxy/8080", "//x//"):
        request = asked(f"{prefix}/{TOKEN}/run?after=3&me=")
        assert (request.token, request.name, request.query) == (TOKEN, "run", {"after": "3"})
    for head in (b"\x16\x03\x01\x02", b"GET /\r\n\r\n", b"GET / FTP/1.0\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n"):
        with pytest.raises(ValueError):  # noqa: PT011 - any will do
            PageRequest.parse(head)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (asked(), None),
        (asked(Host="localhost:9"), None),
        (asked(Host="[::1]:9"), None),
        (asked(Host="HUB.example.com"), None),
        (asked(method="POST", Origin="http://127.0.0.1:8080", Sec_Fetch_Site="same-origin"), None),
        (asked(Origin="https://hub.example.com"), None),  # a proxy asks by the address
        (asked(Host="10.0.0.5:8080", Origin="http://10.0.0.5:8080"), None),
        (asked(Host="10.0.0.5:8080", Origin="http://203.0.113.5"), 403),
        (asked("/"), 403),
        (asked("/other/run"), 403),
        (asked(f"/{TOKEN}x/"), 403),
        (asked("/\u00fc/"), 403),
        (asked(Host="rebound.example.com"), 403),  # a foreign name that resolves to this machine's address
        (asked(Host=""), 403),
        (asked(Origin="http://rebound.example.com"), 403),
        (asked(Origin="null"), 403),
        (asked(method="POST", Sec_Fetch_Site="cross-site"), 403),
        (asked(method="PUT"), 405),
    ],
)
def test_who_is_answered(request_: PageRequest, status: int | None) -> None:
    found = refusal(request_, TOKEN, {"localhost", "hub.example.com"})
    assert (None if found is None else found.status) == status


def test_a_refused_name_is_told_how_to_be_allowed() -> None:
    found = refusal(asked(Host="hub.example.org:80"), TOKEN, ())
    assert found is not None
    assert b"SPARK_HVD_PAGE=127.0.0.1:8080,NAME" in found.to_bytes()


def test_a_picture_has_what_all_displays_show_and_is_json() -> None:
    view = trained(40, 2, metrics={"loss": float("nan"), HOSTILE: 2.0})
    history = RunHistory()
    for second in range(1, 41):
        for rank in range(2):
            metrics = {"loss": float("inf") if second == 3 else 1 / second, HOSTILE: 2.0}
            history.take(record(rank, 2, second, metrics=metrics, host="node-1"), float(second))
    drawn = page.picture(view.snapshot(40.0), history, None)
    answer = page._json(drawn)
    told = json.loads(answer.body)
    assert answer.kind == "application/json"
    assert told["title"] == "train on 2 ranks"
    assert told["columns"][:3] == ["epoch", "step", "loss"]
    assert [row["rank"] for row in told["ranks"]] == [0, 1]
    assert told["ranks"][1]["state"] == "slowest, 1.58x"
    assert told["ranks"][1]["look"] == "slow"
    assert told["facts"]["epoch"] == "1/4"
    first, *_, speed = told["plots"]
    assert first["name"] == "loss"
    assert [line["rank"] for line in first["lines"]] == [0, 1]
    assert first["lines"][0]["x"][:3] == [1.0, 2.0, 4.0]  # the infinite one is omitted
    assert speed["name"] == "samples/s"
    assert speed["lines"][0]["y"][-1] == pytest.approx(32)


def test_many_ranks_and_long_runs_are_drawn_in_part() -> None:
    history = RunHistory()
    for second in range(1, 1500):
        for rank in range(20):
            history.take(record(rank, 20, second), float(second))
    (loss, _) = page._plots(history)
    assert [line["rank"] for line in loss["lines"]] == [0, 3, 6, 9, 12, 15, 18]
    assert all(100 < len(line["x"]) <= 201 for line in loss["lines"])
    assert loss["lines"][0]["x"][-1] == 1499


def test_a_notebook_gets_a_link(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[dict[str, str]] = []
    module = SimpleNamespace(display=lambda bundle, raw: shown.append(bundle))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=module))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    served: Any = SimpleNamespace(url="http://127.0.0.1:8080/q7h3/")
    page.announce(served, "train on 2 ranks", notebook=True)
    assert '<a href="http://127.0.0.1:8080/q7h3/"' in shown[0]["text/html"]
    assert capsys.readouterr() == ("", "")
    page.announce(served, HOSTILE, notebook=False)
    assert "\x1b" not in capsys.readouterr().err


def test_the_page_is_one_file_that_runs_nothing_else() -> None:
    text = files("spark_hvd.runner.watch.display").joinpath("page.html").read_text()
    assert re.findall(r"""(?:src|href)=["'](?!data:|trace\.json\.gz)""", text) == []
    assert set(re.findall(r"\w+://[^\s\"'`)]*", text)) == {"http://www.w3.org/2000/svg"}
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "style="):
        assert word not in text
    (line,) = page._document().headers
    policy = dict(each.strip().split(" ", 1) for each in line.removeprefix("Content-Security-Policy:").split(";"))
    assert policy["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/=]{44}'", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/=]{44}'", policy["style-src"])
