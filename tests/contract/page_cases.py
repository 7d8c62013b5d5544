"""A run that lasts until its page has been visited, and a visitor without a browser."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cloudpickle
import pytest
import torch

import spark_hvd.torch as hvd
from spark_hvd.runner import Reporting, run_local
from tests.conftest import wait_until

cloudpickle.register_pickle_by_value(sys.modules[__name__])
Capture = pytest.CaptureFixture[str]


def train_until(path: Path, fails: bool = False) -> int:
    """Makes steps until a file exists."""
    bar = hvd.progress(None, stage="train", epoch=0)
    bar.report(loss=0.5, **{"<i>name</i>": 1.0})
    print("<script>alert(1)</script>", flush=True)
    while not path.exists():
        time.sleep(0.02)
        bar.step(samples=8)
    if fails:
        raise ValueError("<i>no</i> batch left")
    return hvd.rank()


def train_elastic(path: Path, fails: bool = False) -> int:
    state: Any = hvd.elastic.ObjectState(step=0)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    @hvd.elastic.run
    def step_until(state: Any) -> None:  # without hvd.progress, the optimizer's steps count
        while not hvd.allreduce(torch.tensor(float(path.exists())), name="done"):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)

    step_until(state)
    return hvd.rank()


class Browser:
    """Sends the requests of a browser, and nothing that a browser would refuse to send."""

    def __init__(self, url: str) -> None:
        self.url = urlsplit(url)
        self.address = "127.0.0.1", self.url.port or 0

    def ask(self, name: str, method: str = "GET", path: str | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        try:
            connection.request(method, (path or self.url.path) + name, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def told(self, name: str, method: str = "GET") -> dict[str, Any]:
        return json.loads(self.ask(name, method)[1])

    def raw(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(self.address)
        connection.sendall(data)
        return connection


def watched(
    visit: Callable[[Browser], None],
    capfd: Capture,
    path: Path,
    *,
    fails: bool = False,
    page: bool | None = True,
    start: Callable[..., Any] = run_local,
    fn: Callable[..., int] = train_until,
) -> Any:
    """Run until the page has been visited; errors of the visitor are raised."""
    errors: list[BaseException] = []

    def go() -> None:
        printed = ""

        def url() -> bool:
            nonlocal printed
            printed += capfd.readouterr().err
            return "in a browser: http" in printed and "\n" in printed.partition("in a browser: ")[2]

        try:
            wait_until(url)
            visit(Browser(printed.partition("in a browser: ")[2].split()[0]))
        except BaseException as error:
            errors.append(error)
        finally:
            path.touch()

    visitor = threading.Thread(target=go)
    visitor.start()
    try:
        return start(fn, [path, fails], reporting=Reporting(page=page, progress="off"), timeout=120)
    finally:
        visitor.join()
        if errors:
            raise errors[0]
