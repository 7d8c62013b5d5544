"""The smallest program for a cluster: a model on made-up data, and where each rank ran.

spark-submit --master k8s://... train.py --num-proc 4
"""

from __future__ import annotations

import argparse
import socket

import torch
from pyspark.sql import SparkSession

import spark_hvd


def train(steps: int) -> tuple[str, float]:
    """Fit a linear model with the other ranks; return this rank's host and the last loss."""
    import spark_hvd.torch as hvd

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1).to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss = torch.zeros(())
    for _ in range(steps):
        rows = torch.randn(32, 4, device=device)
        optimizer.zero_grad()
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    print(f"rank {hvd.rank()} of {hvd.size()} on {socket.gethostname()}, {device}: loss {loss.item():.2e}")
    return socket.gethostname(), loss.item()


def main() -> None:
    """Train on the cluster that spark-submit names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-proc", type=int, help="ranks (default: one for each task slot)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ports", help='ports to listen on, such as "30000-30100" (default: any)')
    given = parser.parse_args()
    spark = SparkSession.builder.appName("spark-hvd").getOrCreate()
    options = {"ports": given.ports} if given.ports else {}
    results = spark_hvd.run(train, args=(given.steps,), num_proc=given.num_proc, spark=spark, **options)
    print(f"{len(results)} ranks on {len({host for host, _ in results})} hosts, loss {results[0][1]:.2e}")
    spark.stop()


if __name__ == "__main__":
    main()
