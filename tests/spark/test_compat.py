"""Programs for TorchDistributor and HorovodRunner run with only another import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch

from spark_hvd.compat import HorovodRunner, TorchDistributor, get_spark_partition_data_loader
from spark_hvd.runner.compat.partition import _in_batches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(learning_rate: float, steps: int = 5) -> Any:
    import os

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        x = torch.randn(32, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    weights: list[Any] = [None] * size
    dist.all_gather_object(weights, model.module.weight.tolist())
    ranks: list[Any] = [None] * size
    dist.all_gather_object(ranks, (int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"])))
    return size, weights, ranks


@pytest.mark.slow
@pytest.mark.parametrize("local_mode", [pytest.param(False, marks=pytest.mark.night), True])
def test_a_function_makes_its_own_process_group(spark: SparkSession, local_mode: bool) -> None:
    size, weights, ranks = TorchDistributor(2, local_mode, use_gpu=False).run(train, 0.1, steps=3)
    assert size == 2
    assert weights[0] == weights[1]
    assert ranks == ([(0, 0), (1, 0)] if local_mode else [(0, 0), (0, 1)])


def test_the_value_is_rank_zeros_and_hvd_can_be_used_instead(spark: SparkSession) -> None:
    def rank() -> tuple[int, list[float]]:
        import spark_hvd.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.allreduce(torch.ones(2), op=hvd.Sum, name="ones").tolist()

    assert TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(rank) == (0, [2.0, 2.0])


def test_a_file_gets_its_arguments(spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "there = torch.ones(1)\n"
        "dist.all_reduce(there)\n"
        "print(sys.argv[1:], there.item(), __name__)\n"
        "sys.exit(int(sys.argv[2]) * dist.get_rank())\n"
    )
    distributor = TorchDistributor(2, False, False)
    assert distributor.run(str(script), "--epochs", 0) is None
    assert capfd.readouterr().out.count("['--epochs', '0'] 2.0 __main__") == 2
    with pytest.raises(RuntimeError, match=r"rank 1.*sys\.exit\(3\)"):
        distributor.run(str(script), "--epochs", 3)
    with pytest.raises(ValueError, match=r"epochs=\.\.\.: a file takes arguments of a command line"):
        distributor.run(str(script), epochs=3)
    with pytest.raises(FileNotFoundError):
        distributor.run(str(tmp_path / "none.py"))


def test_a_data_frame_is_read_as_by_pysparks_loader(spark: SparkSession) -> None:
    def rows() -> Any:
        import torch.distributed as dist

        loader = get_spark_partition_data_loader(num_samples=120, batch_size=50)
        epochs = [list(loader) for _ in range(2)]
        shapes = [[(column.shape, column.dtype) for column in batch] for batch in epochs[0]]
        mine = torch.cat([batch[0] for batch in epochs[0]]).tolist()
        assert torch.cat([batch[0] for batch in epochs[1]]).tolist() == mine
        assert all((batch[0].float() == batch[2][:, 1]).all() for batch in epochs[0])
        dist.init_process_group("gloo")
        all_ranks: list[Any] = [None, None]
        dist.all_gather_object(all_ranks, mine)
        return shapes, all_ranks

    frame = spark.range(0, 200, 1, 3).selectExpr("id", "cast(id as float) f", "array(0f, cast(id as float)) a")
    shapes, (one, two) = TorchDistributor(2, False, False).train_on_dataframe(rows, frame)
    assert shapes == [
        [((rows,), torch.int64), ((rows,), torch.float64), ((rows, 2), torch.float32)] for rows in (50, 50, 20)
    ]
    assert sorted({*one, *two}) == list(range(200))
    assert len({*one}) == len({*two}) == 100  # the first twenty repeated
    assert one[100:] == one[:20]


def test_what_cannot_be_is_said_before_anything_is_started(spark: SparkSession) -> None:
    for number in (0, -1):
        with pytest.raises(ValueError, match=f"num_processes={number}: expected a positive"):
            TorchDistributor(number, True, False)
    with pytest.raises(RuntimeError, match=r"driver has no GPUs: spark\.driver\.resource\.gpu\.amount is unset"):
        TorchDistributor(1, True, True)
    with pytest.raises(RuntimeError, match=r"spark\.task\.resource\.gpu\.amount is unset"):
        TorchDistributor(1, False, True)
    with pytest.raises(ValueError, match="local_mode=True: expected local_mode=False"):
        TorchDistributor(2, True, False).train_on_dataframe(print, spark.range(3))
    with pytest.raises(Exception, match="this rank has no rows"):
        get_spark_partition_data_loader(1, 1)


@pytest.fixture
def setting(spark: SparkSession) -> Iterator[Any]:
    keys = []

    def change(key: str, value: str) -> None:
        keys.append(key)
        spark.sparkContext._conf.set(key, value)
        spark._jsparkSession.conf().set(key, value)

    yield change
    for key in keys:
        spark._jsparkSession.conf().unset(key)


def test_a_cluster_with_tls_is_refused_unless_told_otherwise(
    spark: SparkSession, setting: Any, caplog: pytest.LogCaptureFixture
) -> None:
    setting("spark.ssl.enabled", "true")
    distributor = TorchDistributor(1, False, False)
    with pytest.raises(RuntimeError, match=r"TLS encryption.*ignoreSsl to true"):
        distributor.run(lambda: 1)
    setting("pytorch.spark.distributor.ignoreSsl", "true")
    assert distributor.run(lambda: 1) == 1
    assert "tensors between ranks have none" in caplog.text


def test_gpus_are_those_of_the_settings(spark: SparkSession, setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    setting("spark.driver.resource.gpu.amount", "2")
    distributor = TorchDistributor(4, True, True)
    assert distributor.num_processes == distributor.num_tasks == 2

    def visible() -> str | None:
        import os

        return os.environ.get("CUDA_VISIBLE_DEVICES")

    assert distributor.run(visible) == "3,4"
    setting("spark.task.resource.gpu.amount", "2")
    assert TorchDistributor(8, False, True).num_tasks == 4
    with pytest.raises(RuntimeError, match=r"num_processes=3 with spark\.task\.resource\.gpu\.amount=2"):
        TorchDistributor(3, False, True)


@pytest.mark.parametrize(("np", "shown"), [(2, "all"), (-2, "log_callback_only")])
def test_horovod_runner(spark: SparkSession, np: int, shown: str, capfd: pytest.CaptureFixture[str]) -> None:
    def main(factor: float) -> Any:
        import horovod.torch as hvd

        hvd.init()
        print("rank", hvd.rank())
        gathered = torch.tensor([factor], requires_grad=True)
        hvd.allgather(gathered, name="factor").sum().backward()
        assert gathered.grad is not None
        return hvd.rank(), hvd.size(), gathered.grad.item()  # the mean of the ranks' gradients, as in Horovod

    assert HorovodRunner(np=np, driver_log_verbosity=shown).run(main, factor=3.0) == (0, 2, 1.0)
    assert ("rank 1" in capfd.readouterr().out) == (shown == "all")


def test_run_of_horovod_spark(spark: SparkSession) -> None:
    from spark_hvd.runner.compat.horovod import run_on_spark

    def train() -> Any:
        import horovod.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.size()

    assert run_on_spark(train, num_proc=2, verbose=0, env={"A": "b"}, start_timeout=60) == [(0, 2), (1, 2)]
    with pytest.raises(ValueError, match="PYSPARK_PYTHON"):
        run_on_spark(train, executable="python")


def test_horovod_runner_says_what_it_expects() -> None:
    with pytest.raises(ValueError, match="driver_log_verbosity='some': expected one of 'log_callback_only', 'all'"):
        HorovodRunner(np=1, driver_log_verbosity="some")
    with pytest.raises(TypeError, match=r"np=1\.5: expected a whole number"):
        HorovodRunner(np=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "rows", "size"), [([4, 4, 1], 20, 3), ([5], 3, 5), ([1, 2], 9, 4)])
def test_batches_are_cut_anew_over_epochs(given: list[int], rows: int, size: int) -> None:
    def endless() -> Iterator[list[Any]]:
        while True:
            start = 0
            for count in given:
                numbers = torch.arange(start, start + count)
                yield [numbers, [str(number.item()) for number in numbers]]
                start += count

    batches = list(_in_batches(endless(), rows, size))
    assert [len(numbers) for numbers, _ in batches] == [min(size, rows - at) for at in range(0, rows, size)]
    assert torch.cat([numbers for numbers, _ in batches]).tolist() == [at % sum(given) for at in range(rows)]
    assert [text for _, texts in batches for text in texts] == [str(at % sum(given)) for at in range(rows)]
