"""Which lines count as written for CUDA."""

from __future__ import annotations

from pathlib import Path

from tests.gpu_sim.reached import written_for_cuda

SOURCE = """
import torch
from torch.cuda import Event


class Copies:
    events: list[torch.cuda.Event]

    def take(self, tensor: torch.Tensor, on_gpu: bool) -> None:
        if tensor.is_cuda:  # counts
            for _ in range(2):  # counts
                self.note()  # counts
        else:
            self.note()
        if not on_gpu:  # counts
            return
        try:
            with torch.cuda.stream(None):  # counts
                self.note()  # counts
        except RuntimeError:
            self.note()
        where = torch.device("cuda", 0)  # counts
        print("cuda is a word here", where)
"""


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "copies.py"
    path.write_text(SOURCE)
    found = [line.lineno for line in written_for_cuda(path)]
    assert found == [number for number, text in enumerate(SOURCE.splitlines(), 1) if "# counts" in text]
