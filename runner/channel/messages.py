"""The messages from tasks to a hub: each kind with the types of its fields, checked when it is decoded.

Only holders of a run's keys get this far. Their messages may still be malformed, because driver and executors may have
different versions of this package. Unknown fields come from a newer sender, and are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from spark_hvd.runner.channel.state import Kinds, Message
from spark_hvd.world.vitals import Vitals

ASIDE: Kinds = {
    "output": {"stream": str, "text": str},
    "vitals": {"vitals": dict},
    "profile": {"number": int, "part": int, "parts": int, "data": str, "error": str | None},
    "examined": {"cpu": int | float, "status": str, "stacks": str},
}
"""Kinds of messages that need no decision."""
_NUMBERS = int | float
_VITALS = {  # users may pass a float for a count
    name: {int: _NUMBERS, float: _NUMBERS, int | None: _NUMBERS | None, float | None: _NUMBERS | None}.get(hint, hint)
    for name, hint in get_type_hints(Vitals).items()
}


def decode(body: bytes, kinds: Kinds, senders: range) -> Message:
    """Decode one message. ``kinds`` have the types of their fields; a field that may be None may be absent.

    Raises:
        ValueError: It is not a valid message of a task of this run. The text says why.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({type(error).__name__}: {error}): {_shown(body)}") from error
    if not isinstance(message, dict):
        raise ValueError(f"expected a JSON object, got {_shown(body)}")
    kind, rank = message.get("type"), message.get("rank")
    expected = (ASIDE.get(kind) or kinds.get(kind)) if isinstance(kind, str) else None
    if expected is None:
        raise ValueError(f"unknown type {kind!r:.100}: {_shown(body)}")
    if not isinstance(rank, int) or rank not in senders:
        raise ValueError(f"rank={rank!r:.100}: expected a number from 0 to {senders[-1]}, in a message {kind!r}")
    for name, type_ in expected.items():
        if not isinstance(message.get(name), type_):
            raise ValueError(f"{name}={message.get(name)!r:.100}: expected {type_}, in a message {kind!r} of {rank}")
    if not isinstance(message.get("sequence"), int | None):
        raise ValueError(f"sequence={message['sequence']!r:.100}: expected a number, in a message {kind!r} of {rank}")
    if (store := message.get("store")) is not None and not (
        isinstance(store, list) and len(store) == 2 and isinstance(store[0], str) and isinstance(store[1], int)
    ):
        raise ValueError(f"store={store!r:.100}: expected [host, port], in a message {kind!r} of {rank}")
    if kind == "output" and message["stream"] not in ("out", "err"):
        raise ValueError(f"stream={message['stream']!r:.100}: expected 'out' or 'err', in a message 'output' of {rank}")
    return message


def decode_vitals(record: Mapping[str, Any], most_ranks: int) -> Vitals:
    """Decode a rank's record.

    Raises:
        ValueError: It is not a valid record of a rank of this run. The text says why.
    """
    for each in fields(Vitals):
        name, value = each.name, record.get(each.name)
        optional = name not in record and (each.default is not MISSING or each.default_factory is not MISSING)
        if not optional and not _fits(name, value):
            raise ValueError(f"{name}={value!r:.100}: expected {each.type}")
    if not 1 <= record["size"] <= most_ranks or not 0 <= record["rank"] < record["size"]:
        raise ValueError(f"rank {record['rank']} of {record['size']}: this run has {most_ranks} ranks at most")
    return Vitals.from_message(record)


def _fits(name: str, value: object) -> bool:
    match name:
        case "metrics":
            return _are_numbers(value)
        case "epochs_done":
            return isinstance(value, list) and all(_are_numbers(each) and "epoch" in each for each in value)
        case "pending":
            return isinstance(value, list) and all(_is_pending_collective(each) for each in value)
        case _:
            return isinstance(value, _VITALS[name])


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(number, _NUMBERS) for number in value.values())


def _is_pending_collective(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    ranks = value.get("ranks", ())  # must be present, if only as None
    known = ranks is None or (isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks))
    return known and isinstance(value.get("seconds"), _NUMBERS)


def _shown(body: bytes) -> str:
    return f"{body[:100]!r}{'...' if len(body) > 100 else ''}"
