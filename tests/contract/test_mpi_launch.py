"""Programs under mpiexec: joining without our launchers, worlds from communicators, how failures end them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import mpiexec

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, size: int, folder: Path, *arguments: str, **env: str) -> tuple[int, str, float]:
    """Run a program under mpiexec; return exit code, output, seconds."""
    path = folder / "program.py"
    path.write_text(program)
    start = time.monotonic()
    process = mpiexec(
        size,
        *(sys.executable, str(path), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        FOLDER=str(folder),
        **env,
    )
    try:
        output, _ = process.communicate(timeout=250)
    finally:
        process.terminate()
        process.wait(10)
    return process.returncode, output, time.monotonic() - start


WORLDS = """
import os, torch, torch.distributed as dist
from mpi4py import MPI
import spark_hvd.torch as hvd

everyone = MPI.COMM_WORLD
half = everyone.Split(everyone.rank % 2, -everyone.rank)  # two worlds side by side, in the opposite order
def total():
    return hvd.size(), hvd.allreduce(torch.tensor([float(everyone.rank)]), op=hvd.Sum).item()
hvd.init()
seen = [dist.get_backend(), hvd.rank() == everyone.rank, hvd.local_size(), total()]
hvd.init(comm=half)  # leaves the one for the other
seen += [hvd.rank() == half.rank, total()]
hvd.init(comm=half)
hvd.shutdown()
hvd.init()
seen += [hvd.rank() == half.rank, total()]
hvd.shutdown()
hvd.init(comm=everyone)
seen.append(total())
hvd.init(comm=[3, 1] if everyone.rank % 2 else [0, 2])
seen += [hvd.rank() == everyone.rank // 2, total()]
try:
    hvd.init(comm=everyone)
except ValueError as error:
    seen.append("not in this world" in str(error))
hvd.shutdown()
meeting = f"file://{os.environ['FOLDER']}/meeting"
dist.init_process_group("mpi4py", init_method=meeting, rank=everyone.rank, world_size=4)
hvd.init()
seen += [total(), hvd.mpi_enabled()]
hvd.shutdown()
one = torch.ones(1)
dist.all_reduce(one)  # still the user's
seen.append(one.item())
dist.destroy_process_group()
open(f"{os.environ['FOLDER']}/{everyone.rank}", "w").write(str(seen))  # lines of several ranks may mix on the way
"""


@pytest.mark.night
def test_worlds_out_of_communicators(tmp_path: Path) -> None:
    code, output, _ = run(WORLDS, 4, tmp_path)
    assert code == 0, output
    for rank in range(4):
        part = (2, 4.0) if rank % 2 else (2, 2.0)
        expected = [
            "mpi4py",
            True,
            4,
            (4, 6.0),
            True,
            part,
            True,
            part,
            (4, 6.0),
            True,
            part,
            True,
            (4, 6.0),
            True,
            4.0,
        ]
        assert (tmp_path / str(rank)).read_text() == str(expected)


FAILING = """
import sys, time, torch, torch.distributed as dist, spark_hvd.torch as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    if sys.argv[1] == "raises":
        raise ValueError("of rank 1")
    sys.exit(3)
dist.all_reduce(torch.ones(3))  # of torch's own, which nobody negotiates
"""


@pytest.mark.slow  # by day: an exception within MPI in test_mpi_runs.py
def test_an_exception_ends_all(tmp_path: Path) -> None:
    code, output, seconds = run(FAILING, 2, tmp_path, "raises")
    assert code != 0
    assert "ValueError: of rank 1" in output
    assert seconds < 60


@pytest.mark.slow
def test_a_rank_that_exits_is_an_error_on_the_others(tmp_path: Path) -> None:
    code, output, _ = run(FAILING, 2, tmp_path, "exits")
    assert code != 0
    assert "CollectiveError" in output
    assert "rank 1" in output
    assert "has left the world" in output


OTHER_NUMBERS = """
import spark_hvd.torch as hvd
from spark_hvd.context import init as context
from spark_hvd.transport.torch_private import HashStore
from spark_hvd.world.layout import WorldLayout
from spark_hvd.world.layout import World
try:
    context.join(World(WorldLayout.from_hosts(["here"]).ranks[0], None), HashStore(), backend="mpi")
except RuntimeError as error:
    import os
    from mpi4py import MPI
    open(f"{os.environ['FOLDER']}/{MPI.COMM_WORLD.rank}", "w").write(f"{error} {hvd.is_initialized()}")
"""


@pytest.mark.slow
def test_mpi_counts_otherwise(tmp_path: Path) -> None:
    code, output, _ = run(OTHER_NUMBERS, 2, tmp_path)
    assert code == 0, output
    for rank in range(2):
        said = (tmp_path / str(rank)).read_text()
        assert f"this process is rank 0 of 1 for its launcher, but rank {rank} of 2 for MPI" in said
        assert said.endswith("False")


@pytest.mark.slow
def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    program = FAILING.replace("sys.exit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    code, output, _ = run(program, 2, tmp_path, "dies")
    assert code == 9, output


TRAIN = """
import torch, spark_hvd.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
data = torch.arange(24.0).view(8, 3) / 24
for _ in range(3):
    optimizer.zero_grad()
    model(data[hvd.rank() :: hvd.size()]).square().mean().backward()
    optimizer.step()
weights = hvd.allgather(model.weight.detach())
assert all(torch.equal(row, weights[0]) for row in weights)
if hvd.rank() == 0:
    print("TRAINED", hvd.size(), hvd.mpi_enabled(), [round(value, 4) for value in weights[0].tolist()], flush=True)
"""


@pytest.mark.night
def test_one_program_everywhere(tmp_path: Path) -> None:
    code, output, _ = run(TRAIN, 4, tmp_path)
    assert code == 0, output
    program = str(tmp_path / "program.py")
    lines = [output]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--local-addr", "127.0.0.1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", program]
    for arguments in (torchrun, [program]):
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout)
    words = [next(line for line in text.splitlines() if line.startswith("TRAINED")).split(maxsplit=3) for text in lines]
    assert [each[1:3] for each in words] == [["4", "True"], ["4", "False"], ["1", "False"]]
    assert len({each[3] for each in words}) == 1


LARGE = """
import torch, spark_hvd.torch as hvd
from spark_hvd.transport.communicator import ReduceOp
from spark_hvd.context.global_state import current
hvd.init()
communicator = current().communicator
count = (1 << 31) + 8
tensor = torch.ones(count, dtype=torch.uint8)
communicator.allreduce(tensor, ReduceOp.SUM).wait()
assert tensor[0] == tensor[-1] == 2
tensor[-1] = hvd.rank()
communicator.broadcast(tensor, 1).wait()
assert tensor[-1] == 1 and tensor[0] == 2
print("LARGE", flush=True)
"""


@pytest.mark.night
def test_more_than_two_gigabytes(tmp_path: Path) -> None:
    code, output, _ = run(LARGE, 2, tmp_path)
    assert code == 0, output
    assert output.count("LARGE") == 2
