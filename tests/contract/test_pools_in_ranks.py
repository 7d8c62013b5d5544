"""Processes that a rank starts get what the user's script defines, whatever the start method."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing as mp
import spark_hvd
class Value:
    def __init__(self, x): self.x = x
def square(x): return Value(x * x)
def train():
    out = []
    with mp.get_context("spawn").Pool(1) as pool:
        out += [value.x for value in pool.map(square, [2, 3]) if type(value) is Value]
    with mp.get_context("fork").Pool(1) as pool:
        out += [value.x for value in pool.map(square, [4]) if type(value) is Value]
    return out + loaded()
def loaded():
    return []
{loader}
if __name__ == "__main__":
    print(spark_hvd.run_local(train, num_proc=1, verbose=0)[0])
"""


LOADER = """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return float(i)
def loaded():
    loader = torch.utils.data.DataLoader(Rows(), 2, num_workers=1, multiprocessing_context="spawn")
    return [batch.tolist() for batch in loader]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("loader", "values"), [("", "[4, 9, 16]"), (LOADER, "[4, 9, 16, [0.0, 1.0]]")])
def test_what_a_script_defines_reaches_processes_of_a_rank(tmp_path: Path, loader: str, values: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("{loader}", loader))
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=250)
    assert done.stdout.splitlines()[-1:] == [values], done.stderr
