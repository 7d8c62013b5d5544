"""Handwritten digits, trained on ranks that are lost: one is killed, one is told to leave, and training continues.

python examples/elastic_digits.py            # on an embedded local Spark
python examples/elastic_digits.py --local    # without Spark
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import spark_hvd
from spark_hvd.testing import FaultPlan

TEST_IMAGES = 300
BATCH = 32


def train(images: torch.Tensor, labels: torch.Tensor, epochs: int, faults: FaultPlan) -> dict[str, Any]:
    """Run on every rank, from its start, also on ranks that come later; return a rank's final state."""
    import spark_hvd.torch as hvd

    data = torch.utils.data.TensorDataset(images[TEST_IMAGES:], labels[TEST_IMAGES:])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=3e-3), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, worlds=[])

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.epoch < epochs:
            for number, (pixels, digit) in enumerate(loader):
                faults.at(state.step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(pixels), digit).backward()
                optimizer.step()
                sampler.record_batch(number, BATCH)
                state.step += 1
                if state.step % 5 == 0:
                    state.commit()
            state.worlds = [*state.worlds, (state.epoch, hvd.generation(), hvd.size())]
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    loop(state)
    with torch.no_grad():
        right = (model(images[:TEST_IMAGES]).argmax(1) == labels[:TEST_IMAGES]).float().mean().item()
    return {"accuracy": right, "worlds": state.worlds}


def main() -> None:
    """Train with two faults, and print what the ranks went through."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local", action="store_true", help="run the ranks on this machine, without Spark")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the images (default: 30)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    # By then it is the first or second world after the loss: a new rank may come before the other has continued alone.
    faults = FaultPlan().kill(rank=1, step=60)
    for generation in (1, 2):
        faults = faults.notice(rank=0, step=300, generation=generation)
    elastic: dict[str, Any] = {"num_proc": 2, "min_num_proc": 1}
    digits = load_digits()
    call = torch.tensor(digits.data, dtype=torch.float32).div(16), torch.tensor(digits.target), arguments.epochs, faults
    if arguments.local:
        values = spark_hvd.run_elastic_local(train, call, **elastic)
    else:
        from local_spark import local_session

        spark = local_session("elastic_digits", slots=2)
        values = spark_hvd.run_elastic(train, call, spark=spark, **elastic)
        spark.stop()
    for epoch, generation, size in values[0]["worlds"]:
        print(f"epoch {epoch + 1:2} ended in generation {generation}, with {size} rank{'s' * (size > 1)}")
    print(f"accuracy {values[0]['accuracy']:.3f} on {TEST_IMAGES} images that no rank has seen")


if __name__ == "__main__":
    main()
