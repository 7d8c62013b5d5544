"""Horovod's examples, unchanged, on our package: ``PYTHONPATH=. python tests/horovod/upstream_examples.py CHECKOUT``.

CHECKOUT is a clone of horovod/horovod. Digits of scikit-learn replace MNIST, and modules written here replace
torchvision and Keras' loader.
"""

from __future__ import annotations

import bz2
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TORCHVISION = """
class datasets:
    class MNIST:
        def __init__(self, root, train=True, download=False, transform=None):
            import torch
            from sklearn.datasets import load_digits
            images, labels = load_digits(return_X_y=True)
            images = torch.nn.functional.interpolate(torch.tensor(images / 16).float().view(-1, 1, 8, 8), size=(28, 28))
            part = slice(0, 1500) if train else slice(1500, None)
            self.rows = list(zip(images[part], labels[part].tolist()))

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            return self.rows[index]


class transforms:
    Compose = ToTensor = Normalize = staticmethod(lambda *args: None)
"""

KERAS_MNIST = """
def load_data(path=""):
    import numpy as np
    from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8), np.ones((4, 4)))[:, 2:-2, 2:-2] * 15
    images, labels = images.astype("uint8"), labels.astype("uint8")
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
"""
SITE = """
import importlib.util, os, sys


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "keras.src.datasets.mnist":
            return importlib.util.spec_from_file_location(name, os.path.dirname(__file__) + "/keras_mnist.py")


sys.meta_path.insert(0, Finder)
"""

RUN = [sys.executable, "-m", "spark_hvd.runner.cli", "run", "-np", "2"]
HOROVODRUN = ["site/bin/horovodrun", "-np", "2", "-H", "localhost:2", "--gloo", sys.executable]
OURS = [sys.executable, "-m", "spark_hvd.horovod"]
SMALL = ["--model", "MobileNetV2", "--batch-size", "2", "--num-iters", "2", "--num-warmup-batches", "1", "--no-cuda"]
EXAMPLES = (
    (RUN, "pytorch/pytorch_mnist.py", ["--epochs", "2", "--no-cuda"]),
    (RUN, "pytorch/pytorch_mnist.py", ["--epochs", "1", "--no-cuda", "--use-adasum", "--fp16-allreduce"]),
    (OURS, "pytorch/pytorch_mnist.py", ["--epochs", "1", "--no-cuda", "--num-proc", "2"]),
    (RUN, "adasum/adasum_small_model.py", []),
    (RUN, "elastic/pytorch/pytorch_mnist_elastic.py", ["--epochs", "1", "--no-cuda"]),
    (OURS, "spark/pytorch/pytorch_spark_mnist.py", ["--num-proc", "2", "--epochs", "2"]),
    (HOROVODRUN, "pytorch/pytorch_mnist.py", ["--epochs", "1", "--no-cuda"]),
    (OURS, "spark/keras/keras_spark_mnist.py", ["--num-proc", "2", "--epochs", "2"]),
    (HOROVODRUN, "elastic/tensorflow2/tensorflow2_mnist_elastic.py", []),
    (RUN, "elastic/tensorflow2/tensorflow2_synthetic_benchmark_elastic.py", SMALL),
)
KERAS_3_LACKS = (
    (RUN, "keras/keras_mnist.py", []),
    (RUN, "keras/keras_mnist_advanced.py", []),
    (RUN, "keras/keras_imagenet_resnet50.py", []),
    (RUN, "tensorflow2/tensorflow2_keras_mnist.py", []),
    (RUN, "tensorflow2/tensorflow2_keras_synthetic_benchmark.py", SMALL),
    (RUN, "tensorflow2/tensorflow2_mnist.py", []),
    (RUN, "tensorflow2/tensorflow2_synthetic_benchmark.py", SMALL),
    (RUN, "elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py", []),
)


def main(checkout: str, only: str = "") -> None:
    """Run the examples, those with `only` in their name, and print how each ended."""
    from sklearn.datasets import load_digits

    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"torchvision": TORCHVISION, "keras_mnist": KERAS_MNIST, "sitecustomize": SITE}.items():
            Path(folder, f"{name}.py").write_text(text)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            f"{folder}/site",
        ]
        subprocess.run([*pip, shutil.copytree("examples/horovod_package", f"{folder}/package")], check=True)
        images, labels = load_digits(return_X_y=True)
        lines = []
        for image, label in zip(images, labels, strict=True):
            cells = ((10 + number // 8) * 28 + 10 + number % 8 + 1 for number in range(64))
            lines.append(f"{label} " + " ".join(f"{c}:{v:g}" for c, v in zip(cells, image, strict=True) if v))
        Path(folder, "mnist.bz2").write_bytes(bz2.compress("\n".join(lines).encode()))
        env = os.environ | {
            "PYTHONPATH": f"{folder}:{os.getcwd()}",
            "HOME": folder,
            "OMP_NUM_THREADS": "1",
            "KERAS_BACKEND": "tensorflow",
        }
        for command, name, options in (each for each in EXAMPLES + KERAS_3_LACKS if only in each[1]):
            script = Path(checkout).resolve() / "examples" / name
            more = ["--data-dir", folder, "--work-dir", folder] if "spark/" in name else []
            start = time.monotonic()
            done = subprocess.run(
                [*command, script, *options, *more],
                env=env, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400,
            )  # fmt: skip
            said = [line for line in done.stdout.splitlines() if line.strip()]
            ended = "ok" if done.returncode == 0 else f"exit code {done.returncode}"
            print(f"{name} {' '.join(options)}: {ended}, {time.monotonic() - start:.0f} s", flush=True)
            for line in said[-2:] if done.returncode == 0 else said[-12:]:
                print(f"    {line[:160]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
