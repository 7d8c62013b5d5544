"""hvd.checkpoint on real ranks: all of them load what was saved, whatever was killed, truncated or flipped before."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import spark_hvd.torch as hvd
from spark_hvd.checkpoint.format import unpack, write
from spark_hvd.store import Store
from spark_hvd.store.errors import CheckpointError, StoreError
from tests.ranks import Ranks, ranks
from tests.stores import everything, s3  # noqa: F401

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as world:
        yield world


def save(folder: Any, value: float, step: int, **options: Any) -> None:
    hvd.checkpoint.save(folder, {"weight": torch.full((3,), value), "rate": value}, step, **options)
    hvd.barrier()


def value_of(folder: Any, step: int | None = None) -> tuple[int, float, float] | None:
    saved = hvd.checkpoint.load(folder, step)
    return None if saved is None else (saved.step, saved.state["rate"], float(saved.state["weight"].sum()))


def test_what_rank_0_saved_comes_back_everywhere(two: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert two.run(value_of, folder) == [None, None]
    assert hvd.checkpoint.latest(folder) is None
    two.run(save, folder, 2.0, 7)
    assert two.run(value_of, folder) == [(7, 2.0, 6.0)] * 2
    assert value_of(Path(folder)) == (7, 2.0, 6.0), "without a world too"
    assert two.run(hvd.checkpoint.latest, folder) == [7, 7]


def test_the_newest_are_kept(two: Ranks, tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        two.run(save, tmp_path, float(step), step)
    assert sorted(os.listdir(tmp_path)) == ["step-000000000003.pt", "step-000000000010.pt"]
    two.run(lambda: save(tmp_path, 4.0, 4, keep=1))
    assert two.run(value_of, tmp_path) == [(10, 10.0, 30.0)] * 2, "a later one is another's to delete"
    assert two.run(value_of, tmp_path, 4) == [(4, 4.0, 12.0)] * 2
    two.run(lambda: save(tmp_path, 11.0, 11, keep=None))
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_one_falls_back_to_the_one_before(two: Ranks, tmp_path: Path, damage: str) -> None:
    for step in (1, 2):
        two.run(save, tmp_path, float(step), step)
    newest = tmp_path / "step-000000000002.pt"
    data = bytearray(newest.read_bytes())
    data[data.index(torch.full((3,), 2.0).numpy().tobytes())] ^= 1
    newest.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    assert two.run(value_of, tmp_path) == [(1, 1.0, 3.0)] * 2
    for outcome in two.outcomes(value_of, tmp_path, 2):
        assert not outcome[0]
        assert "CheckpointError" in outcome[1]
        assert "is damaged" in outcome[1]
    (tmp_path / "step-000000000001.pt").unlink()
    with pytest.raises(CheckpointError, match=r"step-000000000002\.pt .* is damaged: .*\. Delete it"):
        hvd.checkpoint.load(tmp_path)


ODD: dict[str, Any] = {
    "format that is text": {"format": "x", "step": 2, "state": {}},
    "format that is nothing": {"format": None, "step": 2, "state": {}},
    "format that is a tensor": {"format": torch.ones(2), "step": 2, "state": {}},
    "no step": {"format": 1, "state": {}},
    "step that is text": {"format": 1, "step": "2", "state": {}},
    "state that is a list": {"format": 1, "step": 2, "state": [1]},
    "list": [1, 2],
    "number": 3,
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_one_falls_back_to_the_one_before(two: Ranks, tmp_path: Path, odd: Any) -> None:
    two.run(save, tmp_path, 1.0, 1)
    torch.save(odd, tmp_path / "step-000000000002.pt")
    assert value_of(tmp_path) == (1, 1.0, 3.0)


def test_an_error_without_a_text_is_damage_too(two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mute(file: zipfile.ZipFile) -> None:
        raise EOFError  # like zipfile if an entry ends too early

    two.run(save, tmp_path, 1.0, 1)
    monkeypatch.setattr(zipfile.ZipFile, "testzip", mute)
    with pytest.raises(CheckpointError, match="is damaged: EOFError"):
        value_of(tmp_path)


def test_mutations_of_a_checkpoint_are_valid_or_damaged(two: Ranks, tmp_path: Path) -> None:
    two.run(save, tmp_path, 1.0, 1)
    whole = (tmp_path / "step-000000000001.pt").read_bytes()
    dice = random.Random(14)
    valid = 0
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            at, length = dice.randrange(len(data)), dice.randint(1, 8)
            change = dice.choice(("flip", "cut", "repeat", "zero"))
            if change == "flip":
                data[at] ^= 1 << dice.randrange(8)
            elif change == "cut":
                del data[at : at + length]
            elif change == "repeat":
                data[at:at] = data[at : at + length]
            else:
                data[at : at + length] = bytes(length)
        for tested in (False, True):  # True: as if the checksums had been recomputed
            try:
                state = unpack(bytes(data), "it", "Delete it", {"step": int, "state": dict}, tested=tested)
            except CheckpointError:
                continue
            assert type(state["step"]) is int
            assert type(state["state"]) is dict
            valid += 1
    assert 0 < valid < 2000


MANIFESTS = {
    "nested": "[" * 10_000,
    "sizes": '{"format": 1, "directory": "good", "files": {"state.pt": "x"}}',
    "leads out": '{"format": 1, "directory": "../good", "files": {}}',
    "file leads out": '{"format": 1, "directory": "good", "files": {"../good/state.pt": 3}}',
    "no directory": '{"format": 1, "directory": ["good"], "files": {}}',
    "files": '{"format": 1, "directory": "good", "files": [1]}',
    "format": '{"format": {}, "directory": "good", "files": {}}',
    "list": "[]",
    "not text": '{"format": "\\ud800"}',
}


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_an_odd_manifest_is_damage(tmp_path: Path, manifest: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for good in (tmp_path / "good", folder / "good"):
        write(Store.create(str(good)), str(good / "state.pt"), {"step": 2, "directory": "good", "state": {}})
    (folder / "step-000000000002.sharded.json").write_text(manifest)
    with pytest.raises(CheckpointError, match=r"the manifest .* is damaged"):
        hvd.checkpoint.load_sharded(folder, nn.Linear(1, 1))


def test_errors_of_rank_0_are_raised_on_all(two: Ranks, tmp_path: Path) -> None:
    two.run(save, tmp_path, 1.0, 1)
    path = tmp_path / "step-000000000001.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "format": 99}, path)
    for ok, text in two.outcomes(value_of, tmp_path):
        assert not ok
        assert "format 99, written by a newer spark_hvd" in text
    for ok, text in two.outcomes(value_of, tmp_path, 5):
        assert not ok
        assert "has no checkpoint of step 5, but [1]" in text
    assert two.run(hvd.size) == [2, 2], "the world is whole"


def test_what_could_not_be_read_again_is_refused_at_once(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    with pytest.raises(TypeError, match=r"a\[1\] is a numpy\.float64: expected tensors.*\.item\(\)"):
        write(store, store.join("x"), {"a": [1, np.float64(2)]})
    with pytest.raises(TypeError, match=r"net is a torch\.nn\.modules\.linear\.Linear: .*state_dict\(\)"):
        write(store, store.join("x"), {"net": nn.Linear(1, 1)})
    assert os.listdir(tmp_path) == []


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step=-1: expected at least 0"):
        hvd.checkpoint.save(tmp_path, {}, -1)
    with pytest.raises(ValueError, match=r"keep=0: expected at least 1"):
        hvd.checkpoint.save(tmp_path, {}, 1, keep=0)
    with pytest.raises(TypeError, match=r"step=1\.0: expected a whole number"):
        hvd.checkpoint.save(tmp_path, {}, 1.0)  # type: ignore[arg-type]
    with pytest.raises(hvd.NotInitializedError):
        hvd.checkpoint.save(tmp_path, {}, 1)
    with pytest.raises(StoreError, match=r"memory://x for checkpoints: it ends with the process"):
        hvd.checkpoint.load("memory://x")


# -- sharded


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network(seed)
    mesh = init_device_mesh("cpu", (hvd.size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(5)
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()


def full(model: nn.Module) -> list[list[float]]:
    found = []
    for param in model.state_dict().values():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        found.append(whole.flatten().tolist())
    return found


def train_sharded(folder: Any, steps: int, keep: int = 2) -> list[list[float]]:
    model, optimizer = sharded(0)
    for step in range(steps):
        step_of(model, optimizer)
        hvd.checkpoint.save_sharded(folder, model, optimizer, {"epoch": step}, step=step + 1, keep=keep)
    return full(model)


def resume_sharded(folder: Any, shard: bool = True) -> tuple[int, Any, list[list[float]], list[list[float]]]:
    if shard:
        model, optimizer = sharded(1)
    else:
        model = network(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    saved = hvd.checkpoint.load_sharded(folder, model, optimizer)
    assert saved is not None
    loaded = full(model)
    step_of(model, optimizer)
    return saved.step, saved.state, loaded, full(model)


def test_sharded_by_two_ranks_and_loaded_by_one(two: Ranks, tmp_path: Path) -> None:
    assert two.run(lambda: hvd.checkpoint.load_sharded(tmp_path, *sharded(0))) == [None, None]
    weights, _ = two.run(train_sharded, tmp_path, 3)
    expected, _ = two.run(train_sharded, tmp_path / "longer", 4)
    names = sorted(os.listdir(tmp_path))
    assert [name for name in names if name.endswith("json")] == [f"step-00000000000{n}.sharded.json" for n in (2, 3)]
    assert len([name for name in names if name.endswith(".shards")]) == 2
    for step, state, loaded, after in two.run(resume_sharded, tmp_path):
        assert (step, state, loaded) == (3, {"epoch": 2}, weights)
        assert after == expected
    step, state, loaded, after = resume_sharded(tmp_path, shard=False)
    assert (step, state, loaded) == (3, {"epoch": 2}, weights), "one process, no shards"
    assert np.allclose(np.concatenate(after), np.concatenate(expected), atol=1e-6), "the optimizer's state came too"


def test_no_pickle_of_torch_s_own_goes_between_ranks(two: Ranks, tmp_path: Path) -> None:
    def fn() -> None:
        from torch.distributed import distributed_c10d

        def refuse(*args: Any) -> Any:
            raise AssertionError("torch unpickles what another rank sent")

        unpickle = distributed_c10d._tensor_to_object
        distributed_c10d._tensor_to_object = refuse
        try:
            train_sharded(tmp_path, 2)
            assert resume_sharded(tmp_path)[0] == 2
        finally:
            distributed_c10d._tensor_to_object = unpickle

    two.run(fn)


def test_a_sharded_one_whose_files_are_gone_falls_back(two: Ranks, tmp_path: Path) -> None:
    two.run(train_sharded, tmp_path, 2)
    manifest = json.loads((tmp_path / "step-000000000002.sharded.json").read_bytes())
    part = next(name for name in manifest["files"] if name.endswith(".distcp"))
    (tmp_path / manifest["directory"] / part).unlink()
    (tmp_path / "step-000000000009-abc.shards").mkdir()  # left by an interrupted save
    assert [found[0] for found in two.run(resume_sharded, tmp_path)] == [1, 1]
    assert hvd.checkpoint.latest(tmp_path) == 2
    two.run(train_sharded, tmp_path, 1)
    assert not (tmp_path / "step-000000000009-abc.shards").exists()


def test_a_sharded_one_of_another_model(two: Ranks, tmp_path: Path) -> None:
    two.run(train_sharded, tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"rank 0 cannot load its part of .*shards: .*other"):
        hvd.checkpoint.load_sharded(tmp_path, nn.ModuleDict({"other": nn.Linear(2, 2)}))


@pytest.mark.slow
def test_on_an_object_store(two: Ranks, s3: dict[str, Any]) -> None:  # noqa: F811
    def store() -> Store:
        return Store.create("s3://bucket/checkpoints", storage_options=s3)

    for step in (1, 2, 3):
        two.run(lambda step=step: save(store(), float(step), step))
    assert two.run(lambda: value_of(store())) == [(3, 3.0, 9.0)] * 2
    weights, _ = two.run(lambda: train_sharded(store(), 2, 1))
    assert two.run(lambda: resume_sharded(store())[:3]) == [(2, {"epoch": 1}, weights)] * 2
    names = {name.rpartition("checkpoints/")[2].partition("-")[0] for name in everything(store())}
    assert names == {"step"}
    assert len([name for name in everything(store()) if name.endswith("json")]) == 1


KILLED = """
import os, signal, sys
from spark_hvd.store import Store
store = Store.create(sys.argv[1])
with store.writing(store.join("step-000000000003.pt")) as file:
    file.write(b"x" * 1000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_went_back_is_told_of_what_is_newer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hvd.init()
    try:
        for step in (50, 100):
            save(tmp_path, 1.0, step, keep=None)
        assert not caplog.messages
        save(tmp_path, 2.0, 60)
        assert hvd.checkpoint.latest(tmp_path) == 100
    finally:
        hvd.shutdown()
    (told,) = caplog.messages
    assert "later steps than the 60 just saved, [100]" in told
    assert "load() takes them for newer: delete them" in told


def test_what_a_killed_save_left_goes_with_the_next_one(tmp_path: Path) -> None:
    hvd.init()
    try:
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
        (left,) = tmp_path.iterdir()
        assert left.name.endswith(".tmp")
        other = tmp_path / ".notes.tmp"
        other.touch()
        store = Store.create(tmp_path)
        with store.writing(store.join("step-000000000004.pt")) as file:  # one that is being written
            file.write(b"x")
            save(tmp_path, 1.0, 5)
            assert not left.exists()
            assert other.exists()
        assert sorted(path.name[-6:] for path in tmp_path.iterdir()) == ["004.pt", "005.pt", "es.tmp"]
    finally:
        hvd.shutdown()
