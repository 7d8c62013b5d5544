"""Ranks and counts in words, for messages. Needs no torch: launchers write such messages too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHOWN = 16
"""How many ranks or values a message spells out."""


def shortened(items: Iterable[str]) -> list[str]:
    """Return the first few items, and how many more there are."""
    listed = list(items)
    return listed if len(listed) <= _SHOWN else [*listed[:_SHOWN], f"and {len(listed) - _SHOWN} more"]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 3``, ``ranks 0, 2-5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [str(rank) for rank in run] if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shortened(parts))}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 host, 2 hosts."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nearest(wrong: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint at the name that was meant, after a space; empty if none is as near as `cutoff`, from 0 to 1."""
    from difflib import get_close_matches  # ranks load this module but never need difflib

    folded = {name.casefold(): name for name in names}
    close = get_close_matches(wrong.strip().casefold(), folded, 1, cutoff)
    return f" Did you mean {folded[close[0]]!r}?" if close else ""


def bounded(text: str, most: int) -> str:
    """Return the text, without its middle if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}... ({len(text) - 2 * half:,} characters left out) ...{text[-half:]}"


def text_of(error: BaseException) -> str:
    """Return the text of an exception; a user's `__str__` may fail."""
    try:
        return str(error)
    except Exception:
        return "its text is not available"
