"""Frames between a supervisor and its rank."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from pathlib import Path

from spark_hvd.runner.channel.frames import FrameReader, recv_frame, send_frame
from spark_hvd.runner.outcome.rows import PickledOutcome, from_rows, to_rows

LARGE = b"abcdefgh" * (8 << 20)


def test_a_large_value_is_never_copied_where_copies_keep_heartbeats_from_running(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=send_frame, args=(theirs, {"type": "outcome"}, LARGE))
    with ours, theirs:
        sender.start()
        reader = FrameReader(ours)
        tracemalloc.start()
        try:
            while (frame := reader.read()) is None:
                pass
            rows = [*to_rows(PickledOutcome(0, True, frame[1]), str(tmp_path))]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        sender.join()
        assert peak < len(LARGE) / 8
        assert frame[0] == {"type": "outcome"}
        assert from_rows(rows)[0].data == LARGE
        rows = [*to_rows(PickledOutcome(0, True, frame[1]))]
        assert all(type(chunk) is bytes for *_, chunk in rows)
        assert from_rows(rows)[0].data == LARGE


def test_frames_of_any_size_one_after_the_other() -> None:
    payloads = [b"", b"x", LARGE[: 1 << 20], b"", LARGE[: (1 << 20) - 1], LARGE[: (1 << 20) + 1]]
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send() -> None:
            for _ in range(2):
                for number, payload in enumerate(payloads):
                    send_frame(theirs, {"number": number}, payload)

        sender = threading.Thread(target=send)
        sender.start()
        for number, payload in enumerate(payloads):
            assert recv_frame(ours) == ({"number": number}, payload)
        reader, found = FrameReader(ours), []
        while len(found) < len(payloads):
            if (frame := reader.read()) is not None:
                found.append(frame)
        sender.join()
        assert found == [({"number": number}, payload) for number, payload in enumerate(payloads)]
