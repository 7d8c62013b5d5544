"""The API for JAX on two ranks, in its own environment: the row `jax` of tests/matrix.py.

The default tests, whose names begin with ``test_``, exclude it, because jaxlib has 350 MB, and importing JAX takes
seconds in each rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jax._src import distributed

import spark_hvd.jax as hvd
from spark_hvd import MismatchError, Network, StalledError, run, run_local
from spark_hvd.jax.cluster import _hold
from spark_hvd.jax.trees import over_devices
from spark_hvd.runner.outcome.errors import RankFailedError
from tests.ranks import Ranks, ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, BATCH = 203, 16
"""Two ranks have 102 and 101, so their last batches differ: 6 rows and 5."""


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with ranks(2) as two:
        two.run(hvd.init)
        yield two


def table() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    rows = random.normal(size=(ROWS, 6)).astype(np.float32)
    return rows, np.sin(rows.sum(1)).astype(np.float32)


def parameters(seed: int) -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": {"w": jax.random.normal(first, (6, 8)) * 0.3, "b": jnp.zeros(8)},
        "out": jax.random.normal(second, (8,)) * 0.3,
    }


@jax.jit
def step(params: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    def loss(params: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["hidden"]["w"] + params["hidden"]["b"])
        return jnp.sum(batch["mask"] * (hidden @ params["out"] - batch["y"]) ** 2) / jnp.sum(batch["mask"])

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients), value


def alone(params: Any) -> tuple[Any, list[float]]:
    """Train one process for an epoch on the rows that both ranks had in each step."""
    rows, wanted = table()
    losses = []
    for start in range(0, ROWS, 2 * BATCH):
        batch = {"x": rows[start : start + 2 * BATCH], "y": wanted[start : start + 2 * BATCH]}
        params, loss = step(params, {**batch, "mask": np.ones(len(batch["x"]), np.float32)})
        losses.append(float(loss))
    return params, losses


def mine() -> Iterator[dict[str, np.ndarray]]:
    """Return this rank's batches: the first or the second half of the rows of each step."""
    rows, wanted = table()
    for start in range(0, ROWS, 2 * BATCH):
        part = np.array_split(np.arange(start, min(start + 2 * BATCH, ROWS)), 2)[hvd.rank()]
        yield {"x": rows[part], "y": wanted[part]}


def test_two_ranks_train_as_one_process_on_the_same_rows(world: Ranks) -> None:
    def body() -> tuple[Any, list[float], int]:
        params = hvd.broadcast(parameters(hvd.rank()))
        losses = []
        for batch in hvd.global_batches(hvd.progress(mine(), total=7), BATCH):
            assert batch["x"].shape == (2 * BATCH, 6)
            assert len(batch["x"].sharding.device_set) == jax.device_count()
            params, loss = step(params, batch)
            losses.append(float(loss))
        return jax.tree.map(np.asarray, params), losses, step._cache_size()

    wanted, losses = alone(parameters(0))
    for params, found, compiled in world.run(body):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), params, wanted)
        assert compiled == 1, "of one shape, the last batch too"


def test_broadcast_keeps_structure_dtypes_and_keys(world: Ranks) -> None:
    def body() -> None:
        me = hvd.rank()
        tree = {
            "half": jnp.full((2, 3), me + 1.5, "bfloat16"),
            "whole": [np.arange(4, dtype=np.int64) + me, (jnp.float32(me), None)],
            "key": jax.random.key(me, impl="rbg"),
            "empty": np.zeros((0, 3), np.float16),
            "large": np.full(50_000, me, np.float32),
            "name": f"of {me}",
            "yes": np.bool_(me == 1),
        }
        for root in (1, 0):
            got = hvd.broadcast(tree, root_rank=root)
            assert jax.tree.structure(got) == jax.tree.structure(tree)
            assert got["half"].dtype == jnp.bfloat16
            assert got["half"].is_fully_replicated
            assert np.asarray(got["half"], np.float32).tolist() == [[root + 1.5] * 3] * 2
            assert np.asarray(got["whole"][0]).tolist() == [root, root + 1, root + 2, root + 3]
            assert float(got["whole"][1][0]) == root
            assert got["empty"].shape == (0, 3)
            assert float(got["large"].sum()) == 50_000 * root
            assert (got["name"], bool(got["yes"])) == (f"of {root}", root == 1)
            drawn = jax.jit(jax.random.normal)(got["key"])
            assert float(drawn) == float(jax.random.normal(jax.random.key(root, impl="rbg")))
        cut = hvd.broadcast(np.arange(8.0), sharding=over_devices("data"))
        assert not cut.is_fully_addressable
        assert float(cut.sum()) == 28
        with pytest.raises(ValueError, match=r"has numbers from 1099511627776 to .*, which JAX would"):
            hvd.broadcast({"ids": np.arange(4) + (1 << 40)}, sharding=over_devices("data"))

    world.run(body)


def test_trees_that_differ_are_told_on_all_ranks(world: Ranks) -> None:
    def body() -> list[str]:
        told = []
        for tree in ({"w": np.ones(2 + hvd.rank())}, {"w": np.ones(2, f"f{4 << hvd.rank()}")}, [1] * (hvd.rank() + 1)):
            with pytest.raises(MismatchError) as caught:
                hvd.broadcast(tree)
            told.append(str(caught.value))
        assert hvd.allgather_object(hvd.rank()) == [0, 1], "the world goes on"
        return told

    first, second = world.run(body)
    assert first == second
    where = ["['w'] is float64[3]", "['w'] is float64[2]", "[1] is int"]
    for text, named in zip(first, where, strict=True):
        assert f"the trees of two ranks differ: {named} in that of rank 1" in text


def test_a_checkpoint_goes_on_as_if_nothing_had_been(world: Ranks, tmp_path: Path) -> None:
    """Written by two ranks, with arrays sharded over them; read by two ranks, and by one process."""

    def body(folder: str) -> None:
        params = hvd.broadcast(parameters(0))
        cut = hvd.broadcast(np.arange(8.0), sharding=over_devices("data"))
        tree = {"params": params, "cut": cut, "half": jnp.ones(3, "bfloat16"), "key": jax.random.key(3), "step": 4}
        hvd.checkpoint.save(folder, {"tree": hvd.state_dict(tree), "epoch": 2}, step=1)
        hvd.allgather_object("written")
        found = hvd.checkpoint.load(folder)
        assert found is not None
        empty = {**jax.tree.map(jnp.zeros_like, tree | {"key": 0}), "key": jax.random.key(0), "step": 0}
        got = hvd.load_state_dict(empty, found.state["tree"])
        assert got["cut"].sharding == cut.sharding
        assert (got["step"], found.state["epoch"], float(got["cut"].sum())) == (4, 2, 28)
        assert got["half"].dtype == jnp.bfloat16
        assert float(jax.jit(jax.random.normal)(got["key"])) == float(jax.random.normal(jax.random.key(3)))
        jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, np.asarray(other)), got["params"], params)

    world.run(body, str(tmp_path))
    found = hvd.checkpoint.load(str(tmp_path))
    assert found is not None
    got = hvd.load_state_dict({"params": parameters(9), "cut": np.zeros(8, np.float32), **LIKE}, found.state["tree"])
    jax.tree.map(np.testing.assert_array_equal, got["params"], parameters(0))
    assert got["cut"].tolist() == list(range(8))
    other = {"params": parameters(9) | {"out": jnp.zeros(9)}, "cut": np.zeros(8, np.float32), **LIKE}
    with pytest.raises(ValueError, match=r"\['params'\]\['out'\] is float32\[8\] in that of the state"):
        hvd.load_state_dict(other, found.state["tree"])


LIKE = {"half": jnp.zeros(3, "bfloat16"), "key": jax.random.key(0), "step": 0}


def test_batches_that_jax_would_not_take_are_told() -> None:
    def first(batch: dict[str, Any], size: int = 4) -> Any:
        return next(hvd.global_batches([batch], size))

    with pytest.raises(ValueError, match=r"id has numbers from 0 to 1099511627776, which JAX would truncate to"):
        first({"id": np.array([0, 1 << 40])})
    with pytest.raises(ValueError, match="a batch has 5 rows: expected at most batch_size=4"):
        first({"x": np.ones(5)})
    with pytest.raises(ValueError, match=r"\{'x': 2, 'y': 3\}: expected arrays with equally many rows"):
        first({"x": np.ones(2), "y": np.ones(3)})
    with pytest.raises(ValueError, match="expected another name for the mask"):
        first({"mask": np.ones(2)})
    with pytest.raises(TypeError, match="'words' of a batch is a list"):
        first({"words": ["a"]})
    with pytest.raises(TypeError, match="words is an array of <U1: expected numbers"):
        first({"words": np.array(["a"])})
    with pytest.raises(ValueError, match="batch_size=0: expected a multiple of 1"):
        first({"x": np.ones(0)}, 0)
    made = first({"x": np.array([np.nan, 2.0]), "n": np.array([7, 8])})
    assert np.isnan(made["x"]).tolist() == [True, False, True, True], "copies of the first row"
    assert made["n"].tolist() == [7, 8, 7, 7]
    assert made["mask"].tolist() == [1, 1, 0, 0]
    assert first({"x": np.zeros((0, 2))})["mask"].tolist() == [0, 0, 0, 0]


def test_init_is_asked_twice_too_late_or_beside_another(world: Ranks) -> None:
    def again() -> None:
        hvd.init()
        assert (jax.process_index(), jax.process_count()) == (hvd.rank(), hvd.size())
        with pytest.raises(RuntimeError, match="must be called before any JAX"):
            jax.distributed.initialize()

    def late() -> str:
        if hvd.rank() == 0:
            jax.devices()
        else:
            jax.distributed.initialize(_hold("127.0.0.1", None), 1, 0)
        with pytest.raises(RuntimeError) as caught:
            hvd.init()
        return str(caught.value)

    world.run(again)
    with ranks(2) as two:
        used, other = two.run(late)
    assert "hvd.init() comes too late on this rank: JAX has looked for its devices already" in used
    assert "jax.distributed was initialised as process 0 of 1, but this is rank 1 of 2" in other


def test_an_elastic_rank_is_refused() -> None:
    def body() -> None:
        from spark_hvd.world import launcher

        launcher.install(object())  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r"JAX in an elastic run.*max_restarts"):
            hvd.init()
        with pytest.raises(RuntimeError, match=r"JAX in an elastic run.*max_restarts"):
            jax.distributed.initialize()

    with ranks(1) as one:
        one.run(body)


def test_jax_in_one_rank_only_is_told_after_the_timeout() -> None:
    def body() -> None:
        if hvd.rank() == 1:
            with pytest.raises(StalledError) as caught:
                hvd.init(initialization_timeout=0.5)
            assert "was initialised on 1 rank of 3, but within 0.5 s not on ranks 0, 2. Call hvd.init()" in str(
                caught.value
            )
        hvd.allgather_object("after")

    with ranks(3) as three:
        three.run(body)


def test_jax_in_one_rank_only_is_told_when_the_others_have_returned() -> None:
    def body() -> None:
        if hvd.rank() == 0:
            hvd.init()

    with pytest.raises(RankFailedError, match=r"(?s)not initialised on all ranks: .*rank 1 .*has left.*Call hvd"):
        run_local(body, num_proc=2, verbose=0)


@pytest.mark.parametrize("on_spark", [False, True])
def test_no_argument_is_needed_and_nothing_listens_elsewhere(
    on_spark: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In run_local with a file, and in run with a DataFrame of it; the coordinator uses one of `ports=`."""
    rows, wanted = table()
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({**{f"x{i}": rows[:, i] for i in range(6)}, "y": wanted}), path)

    def body() -> tuple[set[str], float, float, float, int]:
        jax.distributed.initialize()
        assert 23400 <= int(str(distributed.global_state.coordinator_address).rpartition(":")[2]) <= 23499
        places = {
            each.laddr.ip.removeprefix("::ffff:")
            for each in psutil.Process().net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }
        count = total = sums = 0.0
        loader = hvd.get_dataset_shard().numpy_batches(BATCH, features={"x": [f"x{i}" for i in range(6)]})
        for batch in hvd.global_batches(loader, BATCH):
            count += float(jnp.sum(batch["mask"]))
            total += float(jnp.sum(batch["mask"] * batch["y"]))
            sums += float(jnp.sum(batch["mask"] * batch["x"].sum(1)))
        return places, count, total, sums, jax.process_count()

    options: dict[str, Any] = {"num_proc": 2, "verbose": 0, "network": Network(ports="23400-23499")}
    if on_spark:
        spark = request.getfixturevalue("spark")
        results = run(body, spark=spark, data={"train": spark.read.parquet(path)}, **options)
    else:
        results = run_local(body, data={"train": path}, **options)
    for places, count, total, sums, processes in results:
        assert places == {"127.0.0.1"}
        assert (count, processes) == (ROWS, 2)
        assert total == pytest.approx(float(wanted.sum()), abs=1e-4)
        assert sums == pytest.approx(float(rows.sum()), abs=1e-3)


def dies(victim: int, place: str, folder: str) -> None:
    """Compute until rank ``victim``, which kills itself, is lost; inside a collective or outside."""
    hvd.init()
    total = jax.jit(jnp.sum)
    ones = jax.make_array_from_process_local_data(over_devices("data"), np.ones(4, np.float32))
    assert float(total(ones)) == 8
    Path(folder, f"computes-{hvd.rank()}").touch()
    if hvd.rank() == victim:
        while not Path(folder, f"computes-{1 - victim}").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        if place == "collective":
            total(ones).block_until_ready()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("victim", "place", "on_spark"),
    [(0, "collective", True), (1, "collective", False), (0, "own", False)],
)
def test_a_rank_that_dies_is_the_one_that_is_told(
    victim: int, place: str, on_spark: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    arguments: dict[str, Any] = {"args": (victim, place, str(tmp_path)), "num_proc": 2, "verbose": 0}
    start = partial(run, spark=request.getfixturevalue("spark")) if on_spark else run_local
    with pytest.raises(RankFailedError) as caught:
        start(dies, **arguments)
    assert f"rank {victim} of 2 failed" in str(caught.value)
    assert "SIGKILL" in str(caught.value)


def test_jax_s_own_abort_is_an_echo() -> None:
    """A rank's abort arrives before the loss of rank 0, in which JAX's coordinator was."""

    def body() -> None:
        hvd.init()
        hvd.allgather_object("JAX is up")
        if hvd.rank() == 0:
            distributed.global_state.service.shutdown()
        while True:
            time.sleep(0.01)

    with pytest.raises(RankFailedError, match="SIGABRT") as caught:
        run_local(body, num_proc=2, verbose=0)
    assert caught.value.first.echo
