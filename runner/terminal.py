"""Removes everything but colours from text that others have written, before it reaches a terminal.

An escape sequence in a rank's output, or in a value that an exception's message quotes, could otherwise move the
cursor, set the clipboard or the window's title, have the terminal type an answer, or disguise a link.
"""

from __future__ import annotations

import re
from typing import TextIO

_NO_TEXT = re.compile(
    r"""
    (?:\x1b[]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x80-\x9f\n]*(?:\x07|\x1b\\|\x9c)  # with text: titles, links
    |(?P<color>\x1b\[[0-9;:]*m)
    |(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]   # with numbers: the cursor, queries
    |\x1b[ -/]*[0-~]                    # short sequences, and the beginning of unfinished long ones
    |[\x00-\x08\x0b-\x1f\x7f-\x9f]      # other control characters, except tabs and newlines
    |[\u202a-\u202e\u2066-\u2069]       # characters that change the direction of text
    """,
    re.VERBOSE,
)


def harmless(text: str, *, colors: bool = True) -> str:
    """Remove everything that a terminal would take for a command; with ``colors``, keep colours and styles (SGR)."""
    return _NO_TEXT.sub(lambda found: (found["color"] or "") if colors else "", text)


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether a stream goes to a terminal rather than to a program or a file."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # not every stream has isatty(), and a closed file raises
        return False
