"""What other people's text may do to a terminal: have colours, and nothing else.

An escape sequence in what a rank prints, or in a value that an exception's message quotes, could otherwise move the
cursor, set the clipboard or the window's title, have the terminal type an answer, or make a link that looks otherwise.
"""

from __future__ import annotations

import re
from typing import TextIO

_NO_TEXT = re.compile(
    r"""
    (?:\x1b[]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x80-\x9f\n]*(?:\x07|\x1b\\|\x9c)  # those with text: titles, links
    |(?P<color>\x1b\[[0-9;:]*m)
    |(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]   # those with numbers: the cursor, questions
    |\x1b[ -/]*[0-~]                    # short ones, and the beginning of long ones that have no end
    |[\x00-\x08\x0b-\x1f\x7f-\x9f]      # whatever else is a control character, but tabs and newlines
    |[\u202a-\u202e\u2066-\u2069]       # text that is written in another order than it is read
    """,
    re.VERBOSE,
)


def harmless(text: str, *, colors: bool = True) -> str:
    """The text without anything that a terminal would take for a command.

    With ``colors``, those that set colours and the like (SGR) stay.
    """
    return _NO_TEXT.sub(lambda found: (found["color"] or "") if colors else "", text)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads what is written there, and not a program or a file."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # not all that can be written to is a file, and files get closed
        return False
