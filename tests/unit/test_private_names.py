"""Every private name of torch, used once; and only torch_private.py, or a private.py, uses one."""

from __future__ import annotations

import ast
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spark_hvd.store import Store
from spark_hvd.transport import torch_private
from spark_hvd.transport.torch_private import HashStore, PrefixStore

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text()


def test_autograd_and_tensors() -> None:
    ended: list[str] = []
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(lambda grad: torch_private.at_end_of_backward(lambda: ended.append("ended")))
    numbers: list[int] = []
    weight.register_hook(lambda grad: numbers.append(torch_private.current_backward()))
    before = torch_private.changes(weight)
    weight.sum().backward()
    assert ended == ["ended"]
    weight.sum().backward()
    assert torch_private.current_backward() == -1
    assert -1 not in numbers
    assert len({*numbers}) == 2
    target = torch.zeros(2)
    torch_private.copy_all([target], [weight.detach()])
    assert target.tolist() == [1.0, 1.0]
    weight.detach().add_(1)
    assert torch_private.changes(weight) == before + 1
    assert torch_private.storage_key(weight) == torch_private.storage_key(weight.detach()[1:])
    assert torch_private.storage_key(weight) != torch_private.storage_key(target)
    users = torch_private.users_of(target.untyped_storage())
    view = target[1:]
    assert torch_private.users_of(target.untyped_storage()) == users + 1, view
    assert not torch_private.hooks_of(weight)
    upcoming = torch_private.next_hook_id()
    handle = weight.register_post_accumulate_grad_hook(lambda _: None)
    assert list(torch_private.hooks_of(weight)) == [handle.id] == [upcoming]
    assert torch_private.next_hook_id() > upcoming


def test_the_profiler() -> None:
    assert not torch_private.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.is_profiling()


def test_modules() -> None:
    shared = nn.BatchNorm1d(2)
    module = nn.Sequential(shared, shared)
    assert torch_private.children(module) == [("0", shared), ("1", shared)]
    assert isinstance(shared, torch_private.BatchNormBase)
    state = torch_private.with_versions(dict(module.state_dict()), module)
    assert state._metadata["0"]["version"] == shared._version  # type: ignore[attr-defined]


def test_a_group_gets_the_addresses_of_all_ranks_in_one_answer() -> None:
    under = HashStore()
    for rank in range(3):
        under.set(f"0/{rank}", str(rank))
    store = torch_private._AllAtOnce(under, 3)
    store.wait(["0/1"], timedelta(seconds=10))
    for rank in range(3):
        under.delete_key(f"0/{rank}")
    assert [store.get(f"0/{rank}") for rank in range(3)] == [b"0", b"1", b"2"]
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        store.wait(["1/0"], timedelta(seconds=0.05))


def test_groups_listen_on_the_interfaces_that_torch_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    assert len(torch_private.gloo_devices()) == 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        torch_private.gloo_devices()


def test_process_groups() -> None:
    store = HashStore()
    dist.init_process_group("gloo", store=PrefixStore("default", store), rank=0, world_size=1)
    try:
        torch_private.default_group_store().set("key", "value")
        group = torch_private.process_group("mine", [0], store, timedelta(seconds=10), gloo_threads=1)
        assert group in [group for group, _ in torch_private.process_groups()]
        assert group._get_backend(torch.device("cpu")).options._threads == 1  # torch's own value is 2
        dist.all_reduce(torch.ones(1), group=group)
        assert isinstance(torch_private.cuda_backend(group), dist.ProcessGroupGloo)
    finally:
        dist.destroy_process_group()
        torch_private.forget_names()


def test_local_parts() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        whole = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
        assert torch_private.local_part(torch.ones(2)) is None
        other = torch_private.with_local_part(whole, torch.zeros(2))
        assert type(other) is type(whole)
        local = torch_private.local_part(other)
        assert local is not None
        assert local.tolist() == [0.0, 0.0]
    finally:
        dist.destroy_process_group()
        torch_private.forget_names()


class NcclBackend:
    """A CUDA build's; newer ones have versions without the group calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")


def test_nccl() -> None:
    backend = NcclBackend()
    with torch_private.nccl_calls_together(backend):
        assert backend.calls == ["start"]
    assert backend.calls == ["start", "end"]
    with torch_private.nccl_calls_together(object()):
        pass
    stubs = Path(torch.__file__).with_name("_C") / "_distributed_c10d.pyi"
    nccl = stubs.read_text().partition("class ProcessGroupNCCL(")[2]
    for name in ("_group_start", "_group_end", "abort"):
        assert f"def {name}(self)" in nccl


def test_what_sharded_checkpoints_exchange() -> None:
    from torch.distributed.checkpoint import state_dict_saver

    saver: Any = state_dict_saver
    own = saver._DistWrapper
    with torch_private.sharded_objects_by(lambda value, root: value, lambda value: [value]):
        assert saver._DistWrapper(None, False, 0).all_gather_object("mine") == ["mine"]
        assert isinstance(saver._DistWrapper(None, False, 0), own)
    assert saver._DistWrapper is own


def test_sharded_checkpoints(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for url in (str(tmp_path / "local"), "memory://private-names"):
        store = Store.create(url)
        value: dict[str, Any] = {"x": torch.arange(3)}
        dcp.save(value, storage_writer=torch_private.sharded_writer(store, store.url), no_dist=True)
        found: dict[str, Any] = {"x": torch.zeros(3, dtype=torch.long)}
        dcp.load(found, storage_reader=torch_private.sharded_reader(store, store.url), no_dist=True)
        assert found["x"].tolist() == [0, 1, 2]


def test_sharded_checkpoints_exchange_objects_by_ours() -> None:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    asked: list[object] = []

    def broadcast(value: Any, root: int) -> Any:
        asked.append((value, root))
        return value

    def allgather(value: Any) -> list[Any]:
        asked.append(value)
        return [value]

    users: list[Any] = [state_dict_loader, state_dict_saver]
    before = [user._DistWrapper for user in users]
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with torch_private.sharded_objects_by(broadcast, allgather):
            for user in users:
                wrapper = user._DistWrapper(None, True, 0)
                assert wrapper.all_reduce("plan", lambda: "mine", lambda each: [*each, "all"]) == ["mine", "all"]
                assert wrapper.reduce_scatter("plan", lambda: "mine", lambda each: each) == "mine"
                assert wrapper.all_gather("plan", lambda: "mine") == ["mine"]
                assert wrapper.broadcast("plan", lambda: "mine") == "mine"
    finally:
        dist.destroy_process_group()
    assert asked == ["mine", (["mine", "all"], 0), "mine", (["mine"], 0), "mine", ("mine", 0)] * 2
    assert [user._DistWrapper for user in users] == before


def known() -> set[str]:
    return set(re.findall(r"`(_[A-Za-z]\w*)`", PAGE))


def privates(path: Path) -> set[str]:
    """Return a file's private names of torch, PySpark and JAX that the page lists or that it imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            found |= {node.attr} & known()
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "pyspark", "jax"):
            found |= {part for part in (node.module or "").split(".") if part.startswith("_")} & known()
            found |= {alias.name for alias in node.names if alias.name.startswith("_")}
    return found


@pytest.mark.slow
def test_each_package_has_one_file_for_them_and_the_page_lists_them() -> None:
    files = [ROOT / "spark_hvd" / "transport" / "torch_private.py"]
    files += [ROOT / "runner" / "spark" / "private.py", ROOT / "spark_hvd" / "jax" / "private.py"]
    assert {name for path in files for name in privates(path)} == known()
    others = [path for folder in ("spark_hvd", "runner", "estimators") for path in (ROOT / folder).rglob("*.py")]
    strays = {path.name: privates(path) for path in others if path not in files}
    assert {name: names for name, names in strays.items() if names} == {}
