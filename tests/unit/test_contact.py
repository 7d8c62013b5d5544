"""Warnings about ranks that do not report: none too early, and all can be withdrawn."""

from __future__ import annotations

import pytest

from spark_hvd.runner.launch.attempt import Contact


def test_slow_tasks_are_not_yet_heard_of_and_then_are(caplog: pytest.LogCaptureFixture) -> None:
    contact = Contact(2, "127.0.0.1:5", 20.0)
    assert not contact.without_us((), False, 19.0)
    assert not caplog.messages
    for unheard in (21.0, 25.0):
        assert contact.without_us((), False, unheard)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("no rank has reported yet, 21 s after Spark started their tasks")
    assert not contact.without_us({0, 1}, False, 0.0)
    assert not contact.without_us({0, 1}, False, 0.0)
    assert caplog.messages[1:] == ["ranks [0, 1] have reported now, and are watched from here on"]


def test_silence_that_lasts_is_a_cut_off_network(caplog: pytest.LogCaptureFixture) -> None:
    contact = Contact(2, "127.0.0.1:5", 20.0)
    for unheard in (21.0, 61.0, 62.0):
        assert contact.without_us((), False, unheard)
    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith("ranks [0, 1] cannot reach this program at 127.0.0.1:5; training continues")


def test_ranks_that_meet_elsewhere_are_named_at_once(caplog: pytest.LogCaptureFixture) -> None:
    contact = Contact(3, "127.0.0.1:5", 20.0)
    for _ in range(2):
        assert contact.without_us({0, 2}, True, 0.0)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("ranks [1] cannot reach this program")
