"""Late flights in plain JAX, and the same network in PyTorch: the same start, the same rows in each step.

The question, the features and the held-out days are those of flights.py. Both trainings read the DataFrame passed to
`run`, in the same order; what differs is who averages the gradients. In PyTorch it is DistributedOptimizer. In JAX
it is the compiler: a batch is one array over the devices of all ranks, and the loss is its mean.

    python examples/flights_jax.py            two ranks, all flights, two or three minutes
    python examples/flights_jax.py --help     the knobs

It needs `pip install ".[jax]"`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from flights import CATEGORIES, NUMBERS, build_features, encode, load_tables
from local_spark import local_session
from pyspark.sql import functions as F  # noqa: N812 - every Spark program calls it F
from sklearn.metrics import roc_auc_score
from torch import nn

import spark_hvd

BATCH, RATE = 512, 2e-3
FEATURES = {"codes": CATEGORIES, "numbers": NUMBERS}


class Lateness(nn.Module):
    """An embedding for each category, then a small network over them and the numbers; gives the logit of `late`."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(0.5 * torch.randn(size, min(16, size))) for size in sizes)
        width = sum(table.shape[1] for table in self.tables) + len(NUMBERS)
        self.layers = nn.ModuleList([nn.Linear(width, 128), nn.Linear(128, 64), nn.Linear(64, 1)])

    def forward(self, codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Logits, shape (batch,), of codes (batch, len(CATEGORIES)) int64 and numbers (batch, len(NUMBERS))."""
        hidden = torch.cat([*[table[codes[:, i]] for i, table in enumerate(self.tables)], numbers], dim=1)
        for layer in self.layers[:-1]:
            hidden = torch.relu(layer(hidden))
        return self.layers[-1](hidden).squeeze(1)


def logits(params: Any, codes: Any, numbers: Any) -> Any:
    """Compute the same logits in JAX, of a dict of the module's arrays by their names."""
    import jax
    import jax.numpy as jnp

    tables = [params[f"tables.{i}"][codes[:, i]] for i in range(len(CATEGORIES))]
    hidden = jnp.concatenate([*tables, numbers], axis=1)
    for i in range(3):
        hidden = hidden @ params[f"layers.{i}.weight"].T + params[f"layers.{i}.bias"]
        hidden = jax.nn.relu(hidden) if i < 2 else hidden
    return hidden[:, 0]


def train_in_jax(params: dict[str, np.ndarray], epochs: int) -> tuple[dict[str, np.ndarray], list[float], float]:
    """Train on this rank's shard, together with the others; return the weights, the losses and the seconds."""
    import jax
    import jax.numpy as jnp

    import spark_hvd.jax as hvd

    hvd.init()  # jax.distributed.initialize(), with all its arguments

    @jax.jit
    def step(state: Any, batch: dict[str, Any]) -> Any:
        def mean_loss(params: Any) -> Any:
            found, late = logits(params, batch["codes"], batch["numbers"]), batch["label"]
            losses = jnp.maximum(found, 0) - found * late + jnp.log1p(jnp.exp(-jnp.abs(found)))
            return jnp.sum(batch["mask"] * losses) / jnp.sum(batch["mask"])

        loss, gradients = jax.value_and_grad(mean_loss)(state["params"])
        count = state["count"] + 1  # Adam
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
        square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["square"], gradients)
        params = jax.tree.map(
            lambda p, m, v: p - RATE * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8),
            state["params"], mean, square,
        )  # fmt: skip
        return {"params": params, "mean": mean, "square": square, "count": count}, loss

    zeros = {name: np.zeros_like(value) for name, value in params.items()}
    state = hvd.broadcast({"params": params, "mean": zeros, "square": zeros, "count": np.float32(0)})
    loader = hvd.get_dataset_shard("train").numpy_batches(BATCH, shuffle=True, features=FEATURES)
    curve, began = [], time.monotonic()
    for epoch in range(1, epochs + 1):
        losses = []
        loop = hvd.progress(loader, epoch=epoch, epochs=epochs)
        for batch in hvd.global_batches(loop, BATCH):
            state, loss = step(state, batch)
            losses.append(loss)
            loop.report(loss=lambda loss=loss: float(loss))
        curve.append(float(np.mean([float(loss) for loss in losses])))
    return {name: np.asarray(value) for name, value in state["params"].items()}, curve, time.monotonic() - began


def train_in_torch(model: Lateness, epochs: int) -> tuple[Lateness, list[float], float]:
    """Train the twin in PyTorch; return the module, the losses and the seconds."""
    import spark_hvd.torch as hvd

    hvd.init()
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    model, optimizer = hvd.prepare(model, optimizer)
    losses_of = nn.BCEWithLogitsLoss(reduction="none")
    loader = hvd.get_dataset_shard("train").torch_batches(BATCH, shuffle=True, features=FEATURES, row_weights="weight")
    curve, began = [], time.monotonic()
    for epoch in range(1, epochs + 1):
        losses = []
        for batch in (loop := hvd.progress(loader, epoch=epoch, epochs=epochs)):
            optimizer.zero_grad()
            loss = (losses_of(model(batch["codes"], batch["numbers"]), batch["label"]) * batch["weight"]).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            loop.report(loss=loss)
        curve.append(hvd.allreduce(torch.stack(losses).mean(), op=hvd.Average).item())
    return model, curve, time.monotonic() - began


def main() -> None:
    """Features with Spark, both trainings, and both judged on the held-out days."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training days (default: 4)")
    parser.add_argument("--rows", type=int, help="use a random sample of this many flights (default: all)")
    arguments = parser.parse_args()
    print("Starting Spark ...", flush=True)
    spark = local_session("flights-jax", slots=arguments.num_proc)
    encoded, sizes = encode(build_features(*load_tables(spark, arguments.rows)).cache())
    train = encoded.where(~F.col("held_out")).drop("held_out").cache()
    test = encoded.where("held_out").toPandas()
    print(f"{train.count():,} flights to learn from, {len(test):,} on held-out days.")

    torch.manual_seed(0)
    model = Lateness(sizes)
    start = {name: value.numpy() for name, value in model.state_dict().items()}
    options: dict[str, Any] = {"num_proc": arguments.num_proc, "data": {"train": train}, "spark": spark}
    params, curve, seconds = spark_hvd.run(train_in_jax, args=(start, arguments.epochs), **options)[0]
    twin, twins_curve, twins_seconds = spark_hvd.run(train_in_torch, args=(model, arguments.epochs), **options)[0]
    spark.stop()

    codes, numbers = test[CATEGORIES].to_numpy(), test[NUMBERS].to_numpy(np.float32)
    with torch.no_grad():
        twins_scores = twin(torch.tensor(codes), torch.tensor(numbers)).numpy()
    rows = [
        ("JAX", curve, np.asarray(logits(params, codes, numbers)), seconds),
        ("PyTorch", twins_curve, twins_scores, twins_seconds),
    ]
    print(f"\n{'':<10}{'loss, first epoch':>18}{'last':>9}{'AUC':>8}{'seconds':>9}")
    for name, losses, scores, took in rows:
        print(f"{name:<10}{losses[0]:>18.4f}{losses[-1]:>9.4f}{roc_auc_score(test['label'], scores):>8.3f}{took:>9.1f}")


if __name__ == "__main__":
    main()
