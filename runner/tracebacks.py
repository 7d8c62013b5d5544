"""Shortens stacks and tracebacks for people: keeps the user's frames, and folds those of libraries into a line.

All functions take text: that of Python's fault handler (``File "train.py", line 3 in step``, innermost frame first), or
that of ordinary tracebacks (innermost frame last).
"""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from typing import ParamSpec, TypeVar

import spark_hvd
from spark_hvd.world.words import count

_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_TRACEBACK_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_PACKAGES = re.compile(r"/(?:site|dist)-packages/(?P<name>\w+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+/|^<frozen ")
_HOME = os.path.dirname(os.path.abspath(spark_hvd.__file__))
_OURS = re.compile(
    # In a checkout, the runner and the estimators are next to the core.
    rf"/spark_hvd/(?:\w+/)*\w+\.py$|^(?:{re.escape(_HOME)}|{re.escape(os.path.dirname(_HOME))}/(?:runner|estimators))/"
)
_CHAIN = "\n\nThe above exception was the direct cause of the following exception:\n\n"
_PLUMBING = ("_wrapped_call_impl", "_call_impl", "_engine_run_backward")
"""Functions of torch between two of the user's."""
_INNERMOST = 6
"""Number of frames shown of a thread that has none of the user's."""
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str

    @property
    def library(self) -> str:
        """The library it belongs to: "spark_hvd", "torch", "Python" or another package; empty for the user's code."""
        return library_of(self.file)


def library_of(file: str) -> str:
    """Name the library that a source file belongs to; see :attr:`Frame.library`."""
    if _OURS.search(file):
        return "spark_hvd"
    if (package := _PACKAGES.search(file)) is not None:
        return package["name"]
    return "Python" if _STANDARD.search(file) else ""


def threads(stacks: str) -> list[list[Frame]]:
    """Parse the threads of a fault handler's text, each with its innermost frame first, the main thread last."""
    found: list[list[Frame]] = []
    for line in stacks.splitlines():
        if _THREAD.match(line):
            found.append([])
        elif found and (frame := _FRAME.match(line)) is not None:
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            found[-1].append(Frame(frame["file"], number, frame["function"]))
    return [frames for frames in found if frames]


def place(stacks: str) -> str:
    """Say where the user's code is: ``train.py, line 31, in load: time.sleep(9)``; empty if unknown."""
    found = threads(stacks)
    own = [frame for frames in reversed(found) for frame in frames if not frame.library]
    if not own and not found:
        return ""
    frame = own[0] if own else found[-1][0]
    source = _source(frame)
    return f"{os.path.basename(frame.file)}, line {frame.line}, in {frame.function}{f': {source}' if source else ''}"


def folded(stacks: str) -> list[str]:
    """Format the main thread and the threads with the user's code as lines, outermost call first.

    Consecutive frames of a library, between and below the user's, become one line. If the main thread has no frames of
    the user's, its innermost frames are shown.
    """
    lines: list[str] = []
    for number, frames in enumerate(reversed(threads(stacks))):
        if number and not any(not frame.library for frame in frames):
            continue
        if number:
            lines.append("another thread:")
        lines += _folded(frames)
    return lines


def _folded(frames: Sequence[Frame]) -> list[str]:
    if all(frame.library for frame in frames):
        return [line for frame in reversed(frames[:_INNERMOST]) for line in _shown(frame)]
    lines: list[str] = []
    own = [place for place, frame in enumerate(frames) if not frame.library]
    for library, run in groupby(reversed(frames[: own[-1] + 1]), key=lambda frame: frame.library):
        calls = list(run)
        if library:
            lines.append(f"[{count(len(calls), 'frame')} of {library}, {_where(calls[-1])}]")
        else:
            lines += [line for frame in calls for line in _shown(frame)]
    return lines


def _shown(frame: Frame) -> list[str]:
    source = _source(frame)
    return [f'File "{frame.file}", line {frame.line}, in {frame.function}', *([f"  {source}"] if source else [])]


def _where(frame: Frame) -> str:
    return f"{os.path.basename(frame.file)}, line {frame.line}, in {frame.function}"


def _source(frame: Frame) -> str:
    """Return the line of source if this process can see it: in a notebook's cell, or in a file that ranks share."""
    return "" if frame.library else linecache.getline(frame.file, frame.line).strip()


def grouped(stacks: Mapping[int, str]) -> list[tuple[list[int], list[str]]]:
    """Fold the stacks of many ranks, and group the ranks whose folded stacks are the same.

    Returns:
        Ranks and lines, in the order of the first rank of each group.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, text in sorted(stacks.items()):
        lines = folded(text) or text.strip().splitlines()
        if lines:
            groups.setdefault(tuple(lines), []).append(rank)
    return [(ranks, list(lines)) for lines, ranks in groups.items()]


def trim_traceback(text: str) -> str:
    """Fold our own frames and torch's plumbing in a traceback into single lines, and keep all others.

    Lines of source that only this process can see are added. If the last exception has only our frames, it stays
    unchanged. Earlier exceptions of a chain are dropped if they have none of the user's frames and the last one repeats
    their text.
    """
    *causes, last = text.split(_CHAIN)
    causes = [cause for cause in causes if not _is_repeated(cause, last.splitlines()[-1])]
    return _CHAIN.join([*(_trimmed(cause, whole=False) for cause in causes), _trimmed(last, whole=True)])


def _is_repeated(cause: str, last: str) -> bool:
    """Tell whether an exception of a chain has no frames of the user's, and the last line repeats its text."""
    libraries = [library_of(frame["file"]) for frame in map(_TRACEBACK_FRAME.match, cause.splitlines()) if frame]
    words = cause.splitlines()[-1].partition(": ")[2]
    return cause == last or (bool(libraries and words) and all(libraries) and words in last)


def _trimmed(text: str, *, whole: bool) -> str:
    """Trim one exception of a chain; with `whole`, frames stay if all of them are ours."""
    lines: list[str] = []
    for is_frames, part in groupby(
        map(_with_source, _blocks(text.splitlines())), key=lambda block: bool(_TRACEBACK_FRAME.match(block[0]))
    ):
        blocks = list(part)
        hidden = _hidden_names([block[0] for block in blocks]) if is_frames else []
        if not any(hidden) or (whole and all(name == "spark_hvd" for name in hidden)):
            lines += [line for block in blocks for line in block]
            continue
        for name, run in groupby(zip(hidden, blocks, strict=True), key=lambda pair: pair[0]):
            calls = list(run)
            lines += (
                [f"  [{count(len(calls), 'frame')} of {name}]"]
                if name
                else [line for _, block in calls for line in block]
            )
    return "\n".join(lines)


def _blocks(lines: Iterable[str]) -> list[list[str]]:
    """Group each frame with its lines of source; every other line is a block of its own."""
    blocks: list[list[str]] = []
    for line in lines:
        if blocks and line.startswith("    ") and _TRACEBACK_FRAME.match(blocks[-1][0]):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return blocks


def _with_source(block: list[str]) -> list[str]:
    """Add the line of source to a frame that lacks it: this process may see a notebook's cell, while a rank cannot."""
    frame = _TRACEBACK_FRAME.match(block[0])
    if frame is None or len(block) > 1:
        return block
    source = _source(Frame(frame["file"], int(frame["line"]), ""))
    return [*block, f"    {source}"] if source else block


def _hidden_names(lines: Iterable[str]) -> list[str]:
    """Return, for each frame, the library that it belongs to if the frame is hidden, otherwise an empty text."""
    names: list[str] = []
    for line in lines:
        between = "/contextlib.py" in line and names[-1:] == ["spark_hvd"]  # called by a context manager of ours
        names.append("spark_hvd" if between else _hidden(line))
    return names


def _hidden(line: str) -> str:
    frame = _TRACEBACK_FRAME.match(line)
    assert frame is not None
    library = library_of(frame["file"])
    return library if library == "spark_hvd" or (library == "torch" and frame["function"] in _PLUMBING) else ""


class Brief(BaseException):
    """Base of errors whose message is enough in a notebook. ``traceback.print_exception`` still prints all frames."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        lines = []
        for frame in traceback.extract_tb(self.__traceback__):
            library = library_of(frame.filename)
            if library == "spark_hvd":
                break
            if not library:
                cell = "/ipykernel_" in frame.filename or frame.filename.startswith("<ipython-input")
                lines.append(f"{'Cell' if cell else f'File {frame.filename}'}, line {frame.lineno}, in {frame.name}")
                lines.append(f"    {frame.line}")
        return [*lines, *([""] if lines else []), *f"{type(self).__name__}: {self}".splitlines()]


def briefly(function: Callable[P, R]) -> Callable[P, R]:
    """Remove a function's inner frames from Brief errors, so that the caller's frame comes last."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Brief as error:
            raise error.with_traceback(None) from error.__cause__

    return call
