"""Pickling a call, and naming what cannot be pickled."""

from __future__ import annotations

import builtins
import pickle
import sys
import threading
import types
from typing import Any

import pytest

from spark_hvd.runner.outcome.payload import UnpicklableError, dump_call, dump_exception, dump_result, load_exception
from spark_hvd.runner.rank.process import format_error, one_line

Group: Any = getattr(builtins, "ExceptionGroup", None)


class Holder:
    def __init__(self) -> None:
        self.inner = {"locks": [1, threading.Lock()]}

    def train(self) -> None: ...


def test_a_call_travels_whole() -> None:
    offset = 10
    fn, args, kwargs = pickle.loads(dump_call(lambda x, y: x + y + offset, (1,), {"y": 2}))
    assert fn(*args, **kwargs) == 13


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "told"),
    [
        (3, (), {}, r"fn=3 is no function: pass the function itself"),
        (print, 5, {}, r"args=5: expected a tuple of arguments; for a single one, args=\(5,\)"),
        (print, "abc", {}, r"args='abc': expected a tuple"),
        (print, (), [1], r"kwargs=\[1\]: expected a dict"),
        (lambda lr: lr, (1, 2), {}, r"<lambda>\(lr\) does not take args=\(1, 2\), kwargs=\{\}: too many positional"),
        (lambda lr: lr, (), {"rate": 1}, r"missing a required argument: 'lr'"),
    ],
)
def test_a_call_that_cannot_be_made_is_refused(fn: Any, args: Any, kwargs: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        dump_call(fn, args, kwargs)


def test_a_closure_variable_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(UnpicklableError, match=r"fn's closure variable 'lock' is a _thread\.lock"):
        dump_call(lambda: lock, (), {})


def test_an_attribute_deep_in_an_argument_is_named() -> None:
    with pytest.raises(UnpicklableError, match=r"args\[1\]\.inner\['locks'\]\[1\] is a _thread\.lock"):
        dump_call(print, (0, Holder()), {})


def test_the_object_of_a_bound_method_is_searched() -> None:
    with pytest.raises(UnpicklableError, match=r"fn\.__self__\.inner\['locks'\]\[1\]"):
        dump_call(Holder().train, (), {})


def test_a_keyword_argument_is_named() -> None:
    with pytest.raises(UnpicklableError, match=r"kwargs\['lock'\]"):
        dump_call(dict, (), {"lock": threading.Lock()})


def test_an_object_that_holds_itself_ends_the_search() -> None:
    loop: list[object] = [threading.Lock()]
    loop.append(loop)
    with pytest.raises(UnpicklableError, match=r"args\[0\]\[0\]"):
        dump_call(print, (loop,), {})


def test_a_result_that_cannot_travel_names_rank_and_part() -> None:
    with pytest.raises(UnpicklableError, match=r"on rank 3 .* value\['model'\] is a _thread\.lock"):
        dump_result({"loss": 1.0, "model": threading.Lock()}, rank=3)


class NeedsTwo(Exception):
    def __init__(self, a: int, b: int, *, c: int = 0) -> None:
        super().__init__(f"{a} {b}")
        self.a, self.c = a, c


class Locked(ValueError):
    def __init__(self) -> None:
        super().__init__("it is", "locked")
        self.lock = threading.Lock()


class ToldByInit(Exception):
    """Its ``__init__`` takes other arguments than its ``args``, and accepts these, too."""

    def __init__(self, code: object, text: str = "disk") -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_says_what_it_said_where_it_was_raised() -> None:
    rebuilt = load_exception(dump_exception(ToldByInit(3)))
    assert isinstance(rebuilt, ToldByInit)
    assert (str(rebuilt), rebuilt.code) == ("3: disk", 3)
    holder = load_exception(dump_exception(ValueError(Holder)))
    assert isinstance(holder, ValueError)
    assert isinstance(load_exception(dump_exception(Mute("x"))), Mute)


@pytest.mark.skipif(Group is None, reason="Python 3.10 has no groups")
def test_a_group_brings_the_exceptions_in_it() -> None:
    inner = Group("inner", [ToldByInit(3), Locked()])
    rebuilt = load_exception(dump_exception(Group("outer", [NeedsTwo(1, 2), inner])))
    assert isinstance(rebuilt, Group)
    first, second = rebuilt.exceptions
    assert isinstance(first, NeedsTwo)
    assert isinstance(second, Group)
    assert [str(each) for each in second.exceptions] == ["3: disk", "Locked: ('it is', 'locked')"]


@pytest.mark.skipif(Group is None, reason="Python 3.10 has no groups")
def test_a_group_brings_notes_and_the_texts_of_classes_that_the_driver_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_ranks: Any = types.ModuleType("of_ranks")
    monkeypatch.setitem(sys.modules, "of_ranks", of_ranks)
    of_ranks.Lost = type("Lost", (Exception,), {"__module__": "of_ranks"})
    group = Group("outer", [of_ranks.Lost("gone"), Locked()])
    group.add_note("of shard 7")
    data = dump_exception(group)
    monkeypatch.delitem(sys.modules, "of_ranks")
    rebuilt: Any = load_exception(data)
    assert rebuilt.__notes__ == ["of shard 7"]
    assert repr(rebuilt.exceptions[0]) == "RuntimeError('Lost: gone')"


def test_exceptions_can_be_raised_again() -> None:
    rebuilt = load_exception(dump_exception(NeedsTwo(1, 2, c=3)))
    assert isinstance(rebuilt, NeedsTwo)
    assert (str(rebuilt), rebuilt.a, rebuilt.c) == ("1 2", 1, 3)
    assert repr(load_exception(dump_exception(KeyError("k")))) == "KeyError('k')"
    assert repr(load_exception(dump_exception(Locked()))) == "ValueError(\"Locked: ('it is', 'locked')\")"
    large = dump_exception(OSError("x" * 20_000_000))
    assert len(large) < 100_000
    assert isinstance(load_exception(large), OSError)
    assert load_exception(b"") is None
    assert repr(load_exception(b"\x80\x04garbage", "app.Lost: gone")) == "RuntimeError('app.Lost: gone')"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_exception_is_told_by_type_and_message_and_not_at_length() -> None:
    noted = ValueError("wrong")
    noted.add_note("a note\nof two lines")
    assert one_line(noted) == "ValueError: wrong"
    assert "of two lines" in format_error(noted)
    huge = RuntimeError("a" * 30_000_000 + "the end")
    assert len(one_line(huge)) < 20_000
    assert one_line(huge).startswith("RuntimeError: aaa")
    assert one_line(huge).endswith("the end")
    assert "characters left out" in one_line(huge)
    assert len(format_error(huge)) < 300_000


def test_the_error_pickles() -> None:
    assert str(pickle.loads(pickle.dumps(UnpicklableError("text")))) == "text"
