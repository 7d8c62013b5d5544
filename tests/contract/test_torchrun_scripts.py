"""Scripts that create their own process group, as for torchrun, run unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

import spark_hvd
from spark_hvd.runner.rank.script import Script, run_script

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
local = int(os.environ["LOCAL_RANK"])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
total = torch.ones(1)
dist.all_reduce(total)
name = f"{dist.get_rank()} of {dist.get_world_size()} as {local}"
open(os.path.join(sys.argv[1], name), "w").write(str(total.item()))
"""


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()\n"])
def test_a_script_for_torchrun_runs_as_it_is(tmp_path: Path, end: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT + end)
    out = tmp_path / "out"
    out.mkdir()
    spark_hvd.run_local(run_script, (Script.read(str(path), [str(out)]),), num_proc=2, verbose=0)
    assert {each.name: each.read_text() for each in out.iterdir()} == {"0 of 2 as 0": "2.0", "1 of 2 as 1": "2.0"}
