"""Handwritten digits, a small CNN, two ranks: the shortest whole program.

python examples/pytorch_digits.py            ranks inside Spark tasks
python examples/pytorch_digits.py --local    the same, as plain processes: no Spark, no Java
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import spark_hvd

BATCH = 32


def make_model() -> nn.Module:
    """A CNN for 8 x 8 images in 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


def train(images: np.ndarray, digits: np.ndarray, epochs: int) -> dict[str, torch.Tensor]:
    """Train on every size-th image, together with the other ranks; return the weights, the same on every rank."""
    import spark_hvd.torch as hvd

    hvd.init()
    steps = len(images) // (hvd.size() * BATCH)  # the same number on every rank
    own_images = torch.from_numpy(images[hvd.rank() :: hvd.size()])
    own_digits = torch.from_numpy(digits[hvd.rank() :: hvd.size()])

    torch.manual_seed(hvd.rank())
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(1, epochs + 1):
        total = torch.zeros(())
        for batch in torch.randperm(len(own_digits))[: steps * BATCH].split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(own_images[batch]), own_digits[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean_loss = hvd.allreduce(total / steps, op=hvd.Average).item()
        if hvd.rank() == 0 and (epoch % 5 == 0 or epoch == epochs):
            print(f"epoch {epoch:2d}/{epochs}   loss {mean_loss:.4f}")
    return model.state_dict()


def main() -> None:
    """Train on 80 % of the digits with `run` (or `run_local`), test on the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: 20)")
    parser.add_argument("--local", action="store_true", help="plain processes instead of Spark tasks")
    arguments = parser.parse_args()

    data = load_digits()
    images = (data.images[:, np.newaxis] / 16).astype(np.float32)  # (1797, 1, 8, 8), in 0..1
    train_images, test_images, train_digits, test_digits = train_test_split(
        images, data.target, test_size=0.2, stratify=data.target, random_state=0
    )

    inputs = (train_images, train_digits, arguments.epochs)
    if arguments.local:
        weights = spark_hvd.run_local(train, args=inputs, num_proc=arguments.num_proc)
    else:
        from local_spark import local_session

        spark = local_session("digits", slots=arguments.num_proc)
        weights = spark_hvd.run(train, args=inputs, num_proc=arguments.num_proc, spark=spark)
        spark.stop()

    model = make_model().eval()
    model.load_state_dict(weights[0])
    right = model(torch.from_numpy(test_images)).argmax(1).numpy() == test_digits
    print(f"{right.sum()} of {len(right)} test digits right: accuracy {right.mean():.3f}")


if __name__ == "__main__":
    main()
