"""Each finding about GPUs: which rank gets which, and duplicates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spark_hvd.runner.diagnosis import probe
from spark_hvd.runner.diagnosis.gpu_checks import check_gpus
from spark_hvd.runner.diagnosis.report import Finding, Level
from tests.doctor_cases import application, host, levels, of, task, with_gpus, with_package

BOTH = {"spark.executor.resource.gpu.amount": "2", "spark.task.resource.gpu.amount": "1"}


def found(
    devices: int,
    assigned: list[list[str] | None],
    settings: dict[str, str] | None = None,
    *,
    backend: str | None = None,
    each: int | None = None,
    procs: int = 1,
) -> list[Finding]:
    place = with_gpus(host("a"), devices) if devices else host("a")
    tasks = [task(number, gpus=gpus) for number, gpus in enumerate(assigned)]
    return list(check_gpus(application(settings=settings or {}, procs_per_task=procs), [place], tasks, backend, each))


def test_none_anywhere() -> None:
    (finding,) = found(0, [None, None])
    assert finding.level is Level.OK
    assert "on the CPU" in finding.found


def test_each_task_has_its_own() -> None:
    findings = found(2, [["0"], ["1"]], BOTH)
    assert levels(findings) == {Level.OK}
    assert "each GPU once" in of("GPU assignment", findings).found


def test_two_tasks_with_one_gpu() -> None:
    finding = of("GPU assignment", found(2, [["0"], ["0"]], BOTH))
    assert finding.level is Level.ERROR
    assert "ranks 0 and 1 on host a were handed the same GPU 0" in finding.found


def test_shares_of_a_gpu_are_a_warning() -> None:
    findings = found(1, [["0"], ["0"]], {**BOTH, "spark.task.resource.gpu.amount": "0.5"})
    assert of("GPU settings", findings).level is Level.WARNING
    assert "2 ranks share one GPU" in of("GPU settings", findings).found
    assert of("GPU assignment", findings).level is Level.WARNING


def test_executors_with_gpus_and_tasks_without() -> None:
    finding = of("GPU settings", found(2, [None, None], {"spark.executor.resource.gpu.amount": "2"}))
    assert finding.level is Level.WARNING
    assert finding.remedy == "--conf spark.task.resource.gpu.amount=1"


def test_torch_without_cuda() -> None:
    finding = of("CUDA", found(0, [["0"]], BOTH))
    assert finding.level is Level.WARNING
    assert "built without CUDA" in finding.found
    assert finding.remedy.startswith("pip install torch")


def test_a_driver_that_is_too_old_for_torch() -> None:
    said = "The NVIDIA driver on your system is too old (found version 11040)."
    place = with_gpus(host("a"), 0)
    detail = {**place.packages["torch"].detail, "why": said}
    place = with_package(place, "torch", replace(place.packages["torch"], detail=detail))
    finding = of("CUDA", check_gpus(application(settings=BOTH), [place], [task(0, gpus=["0"])], None, None))
    assert finding.level is Level.WARNING
    assert said in finding.found
    assert finding.remedy == "Install a newer driver there, or a torch built for an older CUDA"


def of_torch(**cuda: Any) -> dict[str, Any]:
    """Return the program's report of a torch built for CUDA with this answer."""
    nccl = SimpleNamespace(version=lambda: (2, 27, 5))
    torch = SimpleNamespace(
        version=SimpleNamespace(cuda="12.8"),
        cuda=SimpleNamespace(nccl=nccl, **cuda),
        distributed=SimpleNamespace(
            is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: True
        ),
    )
    return probe._torch(torch)


def test_what_torch_is_asked() -> None:
    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check\nthat you have one")

    blind = of_torch(is_available=lambda: False, init=no_driver)
    assert (blind["why"], blind["devices"]) == ("Found no NVIDIA driver on your system. Please check", [])
    three = of_torch(
        is_available=lambda: True,
        device_count=lambda: 3,
        get_device_name=lambda number: f"GPU {number}",
        can_device_access_peer=lambda one, other: (one, other) != (0, 2),
    )
    assert three["why"] is None
    assert three["no_peers"] == [(0, 2)]


def test_gpus_without_peer_access() -> None:
    place = with_gpus(host("a"), 2)
    detail = {**place.packages["torch"].detail, "no_peers": [[0, 1]]}
    place = with_package(place, "torch", replace(place.packages["torch"], detail=detail))
    finding = of("GPU peers", check_gpus(application(settings=BOTH), [place], [task(0, gpus=["0"])], None, None))
    assert finding.level is Level.WARNING
    assert "1 pairs of GPUs on a have no peer access, 0 and 1 for one" in finding.found


@pytest.mark.parametrize(
    ("keys", "together"),
    [
        (("a/5f00aa11/4026531840", "b/5f00aa11/4026532281"), True),
        (("a/5f00aa11/4026531840", "b/90bb77cc/4026531840"), False),
        (("a", "b"), False),  # their kernels are unknown
    ],
)
def test_one_gpu_a_container(keys: tuple[str, str], together: bool) -> None:
    hosts = [replace(with_gpus(host(key[0]), 1), key=key) for key in keys]
    tasks = [replace(task(number, name, gpus=["0"]), key=keys[number]) for number, name in enumerate("ab")]
    findings = list(check_gpus(application(settings=BOTH), hosts, tasks, None, None))
    found = [finding for finding in findings if finding.check == "GPU peers"]
    assert len(found) == together
    if together:
        assert found[0].level is Level.WARNING
        assert "2 containers of one machine have GPUs of their own (1 in a, 1 in b)" in found[0].found
        assert "One executor with all GPUs of the machine" in found[0].remedy


def test_nccl_without_gpus() -> None:
    assert of("CUDA", found(0, [None], backend="nccl")).level is Level.ERROR


def test_more_ranks_than_gpus_where_spark_assigns_none() -> None:
    finding = of("GPU assignment", found(1, [None, None]))
    assert finding.level is Level.WARNING
    assert of("GPU assignment", found(1, [None, None], backend="nccl")).level is Level.ERROR
    assert "ranks 0 and 1 share a GPU of host a" in finding.found
    assert of("GPU assignment", found(2, [None, None])).level is Level.OK


def test_an_address_that_does_not_exist() -> None:
    wrong = [f for f in found(1, [["3"]], BOTH) if f.level is Level.ERROR]
    assert "task 0 on a was assigned GPU 3, but torch sees only 1 there" in wrong[0].found
    assert "nvidia-smi" in wrong[0].remedy


def test_several_ranks_of_a_task_share_its_gpus_out() -> None:
    assert "rank 0 on a: 0; rank 1 on a: 1" in of("GPU assignment", found(2, [["0", "1"]], BOTH, procs=2)).found
    lacking = of("GPU assignment", found(2, [["0"]], BOTH, procs=2, each=1))
    assert lacking.level is Level.ERROR
    assert "2 ranks of a task need 2 GPUs, but Spark assigned 1" in lacking.found
