"""The table of a run as text of any width, and as a notebook's HTML."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from spark_hvd.runner.watch.display.notebook import page
from spark_hvd.runner.watch.display.text import table
from spark_hvd.runner.watch.view import RunView
from spark_hvd.world.vitals import Vitals
from tests.trained_ranks import record, trained

# ---- the table as text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 39, 40, 60, 79, 80, 100, 200])
@pytest.mark.parametrize("size", [1, 2, 64])
def test_no_line_is_wider_than_the_terminal(width: int, size: int) -> None:
    view = trained(size=size, metrics={"loss": 0.5, "accuracy": 0.98765, "a very long name of a metric": 12345.0})
    view.mark("the run hangs: rank 1 never entered allreduce 'loss'. " * 30)
    lines = table(view.snapshot(46.0), width, 16)
    assert max(len(line.text) for line in lines) <= width
    assert len(lines) <= 2 + 16 + 2 + 6
    assert any("loss" in line.text for line in lines) or width < 40


def test_where_there_is_no_room_what_matters_least_goes_first() -> None:
    snapshot = trained().snapshot(40.0)
    headings = [table(snapshot, width, 16)[1].text.split() for width in (200, 79, 60, 39)]
    assert headings[0] == ["rank", "epoch", "step", "loss", "samples/s", "compute", "data", "comm", "CPU", "memory"]
    assert headings[1] == ["rank", "epoch", "step", "loss", "samples/s", "data", "comm", "CPU"]
    assert headings[2] == ["rank", "epoch", "step", "loss", "samples/s", "comm"]
    assert headings[3] == ["rank", "step", "loss"]


def test_the_number_of_ranks_that_are_not_shown_is_said() -> None:
    lines = [line.text for line in table(trained(size=64).snapshot(40.0), 120, 16)]
    assert lines[-2] == "and 48 more"
    assert lines[-1].split()[0] == "all"
    assert lines[-1].split()[1] == "2,048"


def test_ranks_that_stand_out_have_their_colours() -> None:
    view = trained(size=3)
    for second in (41, 42, 43, 44, 45):
        for rank in (0, 1):
            view.take(record(rank, 3, second), float(second))
    styles = [line.style for line in table(view.snapshot(45.0), 100, 16)]
    assert styles[2:5] == ["", "", "dim"]  # the third is silent; no rank is called slow before all are known
    lines = table(trained(size=3).snapshot(40.0), 100, 16)
    assert [line.style for line in lines[2:5]] == ["", "yellow", ""]
    assert lines[3].text.endswith("slowest, 1.58x")


# ---- the notebook's HTML ---------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that all elements are closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_html_is_well_formed_and_has_a_row_a_rank() -> None:
    view = trained(size=4)
    text = page(view.snapshot(40.0), view.summary(40.0))
    parsed = Page(text)
    assert parsed.tags.count("tr") == 1 + 4 + 1 + len(view.summary(40.0).facts())
    assert "slowest, 1.58x" in parsed.texts
    assert "40/50" in parsed.texts
    assert 'title="compute 85 %, data 10 %, communication 5 %"' in text


def test_the_legend_has_what_is_shown() -> None:
    assert page(trained().snapshot(40.0)).count("&#9632;") == 3
    view = RunView("hello on 1 rank", 1, 0.0)
    view.take(Vitals(0, 1, 0, 0.0), 0.0)
    assert "&#9632;" not in page(view.snapshot(1.0))


def test_what_comes_from_outside_is_escaped() -> None:
    view = trained(metrics={"<img src=x>": 1.0}, stage="<script>alert(1)</script>")
    view.mark("<b>hung</b> & gone")
    parsed = Page(page(view.snapshot(40.0), view.summary(40.0)))
    assert not {"script", "img"} & set(parsed.tags)
    assert "<b>hung</b> & gone" in parsed.texts
    assert "<img src=x>" in parsed.texts


def test_many_ranks_do_not_make_a_long_page() -> None:
    assert Page(page(trained(size=100).snapshot(40.0))).tags.count("tr") == 1 + 32 + 1 + 1


def test_as_long_as_nothing_is_heard_there_is_one_line() -> None:
    snapshot = RunView("train on 8 ranks", 8, 0.0).snapshot(7.0)
    assert [line.text for line in table(snapshot, 80, 16)] == [
        "train on 8 ranks   7.0 s   no reports from the ranks yet"
    ]
    assert Page(page(snapshot)).tags == ["div", "b"]
