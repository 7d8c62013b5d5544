"""KerasEstimator on TensorFlow, in a separate program: columns of numbers, and of text, which torch lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_hvd.estimators import DataError, KerasModel, ModelError
from tests.spark.keras.support import estimator, net
from tests.walk.stranger import configure

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.slow

ON_TENSORFLOW = """
import sys
import numpy as np
from pyspark.sql import SparkSession, functions as F
builder = SparkSession.builder.master("local[2]").config("spark.executorEnv.SPARK_HVD_TESTS_LOADED", "tensorflow")
spark = builder.getOrCreate()
import keras, tensorflow as tf
from spark_hvd.estimators import DataError, KerasEstimator, KerasModel

cities, words = ["Genf", "Köln", "", "東京", "not in the vocabulary"], ["late again", "in time", "Late, LATE", "?"]
rows = [
    (i, cities[i % 5], words[i % 4], i % 7, [i / 80, i % 3 / 3], float(i % 5 - i % 4), i % 3 == 0) for i in range(80)
]
df = spark.createDataFrame(rows, "id int, city string, title string, day int, x array<float>, y float, held boolean")
df = df.coalesce(1).cache()
layers, features = keras.layers, ["city", "title", "day", "x"]

def net(scores=1):
    keras.utils.set_random_seed(1)
    city, title, day, x = (
        keras.Input((1,), dtype="string"), keras.Input((), dtype="string"), keras.Input((1,), dtype="int32"),
        keras.Input((2,)),
    )
    vectors = layers.TextVectorization(output_mode="tf_idf")
    vectors.adapt(words)
    known = layers.StringLookup(vocabulary=cities[:4])(city)
    parts = [
        layers.Flatten()(layers.Embedding(5, 3)(known)), vectors(title),
        layers.Embedding(4, 2)(layers.Hashing(4)(title)),
        layers.CategoryEncoding(8, "one_hot")(layers.IntegerLookup(vocabulary=list(range(7)))(day)), x,
    ]
    return keras.Model([city, title, day, x], layers.Dense(scores)(layers.Concatenate()(parts)))

def estimator(**changed):
    settings = {
        "model": net(), "optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "feature_cols": features,
        "label_cols": ["y"], "num_proc": 2, "epochs": 3, "random_seed": 1, "scale_lr": False, "verbose": 0,
        "progress": "off",
    }
    return KerasEstimator(**{**settings, **changed})

def inputs(some):
    columns = {name: [row[name] for row in some] for name in features}
    city, title = (tf.constant(columns[name]) for name in ("city", "title"))
    return [city[:, None], title, np.array(columns["day"], "int32")[:, None], np.array(columns["x"], "float32")]

# Each epoch is one step on all rows, so that their order does not matter.
every = df.collect()
trained_on, held = [row for row in every if not row.held], [row for row in every if row.held]
alone, wanted = net(), []
alone.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
for _ in range(3):
    loss = alone.train_on_batch(inputs(trained_on), np.array([row.y for row in trained_on], "float32"))
    val_loss = alone.evaluate(inputs(held), np.array([row.y for row in held], "float32"), verbose=0)
    wanted.append((float(loss), float(val_loss)))

def check(fitted, exact):
    found = [(row["loss"], row["val_loss"]) for row in fitted.getHistory()]
    if exact:
        np.testing.assert_allclose(found, wanted, 1e-5)
        for mine, theirs in zip(fitted.getModel().get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, 1e-4, 1e-6)
    predicted = fitted.transform(df).select(*features, "prediction").collect()
    by_keras = fitted.getModel().predict(inputs(predicted), verbose=0)[:, 0]
    np.testing.assert_allclose([row.prediction for row in predicted], by_keras, 1e-5, 1e-6)

def raises(message, call):
    try:
        call()
    except DataError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

fitted = estimator(batch_size=40, validation="held").fit(df)
check(fitted, True)
fitted.save(sys.argv[1] + "/model")
check(KerasModel.load(sys.argv[1] + "/model"), True)
shapes = [[-1, 1], None, [-1, 1], None]
fresh = KerasModel(model=net(), feature_columns=features, label_columns=["y"], output_cols=["out"], input_shapes=shapes)
assert fresh.transform(df).select("out").count() == 80

# From files, in small batches, through what Parquet has of text; and by a function of pandas that makes text.
df.where("not held").write.parquet(sys.argv[1] + "/rows")
df.where("held").write.parquet(sys.argv[1] + "/held")
again = estimator(
    num_proc=1, batch_size=8, shuffle=True, store=sys.argv[1] + "/store", epochs=2,
    transformation_fn=lambda frame: frame.assign(city=frame.city.fillna("Genf")),
)
parquet = [sys.argv[1] + "/rows", sys.argv[1] + "/held"]
check(again.fit_on_parquet(*parquet), False)

holes = df.withColumn("city", F.when(F.col("id") % 40 != 39, F.col("city")))
numbers, stored = df.withColumn("city", F.lit(1)), estimator(store=sys.argv[1] + "/store")
for message, call in {
    "column 'city' has 2 null(s) in 80 rows: fill or drop them first": lambda: stored.fit(holes),
    "column 'city' is of type int, but the model was trained with string": lambda: fitted.transform(numbers),
    "column 'title' has the type string, which cannot become a tensor": lambda: estimator(label_cols=["title"]).fit(df),
    "column 'city' is text, which stack_features=True cannot": lambda: estimator(stack_features=True).fit(df),
    "column 'city' is text, but input_dtypes": lambda: estimator(input_dtypes=["int64", None, None, None]).fit(df),
}.items():
    raises(message, call)
try:
    fitted.transform(holes).collect()
except Exception as error:
    assert "column 'city' in transform has " in str(error), error
else:
    raise AssertionError("nulls")

# Of numbers, in ranks that draw random ones.
df = spark.range(0, 200, 1, 2).selectExpr("array(cast(rand(1) as float), cast(rand(2) as float)) f", "id")
df = df.selectExpr("f", "cast(2 * f[0] - f[1] as float) y").cache()
model = keras.Sequential([layers.Input((2,)), layers.Dense(8, "relu"), layers.Dropout(0.1), layers.Dense(1)])
model.add(layers.Lambda(lambda x: x + 1))
fitted = KerasEstimator(
    model=model, optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"], validation=0.2, epochs=4,
    checkpoint_every=2, feature_cols=["f"], label_cols=["y"], batch_size=20, num_proc=2, random_seed=1,
).fit(df)
first, *_, last = fitted.getHistory()
assert last["val_loss"] < first["val_loss"] and last["mae"] < first["mae"], fitted.getHistory()
found = fitted.transform(df).select("f", "prediction").collect()
wanted = fitted.getModel().predict(np.array([row["f"] for row in found], "float32"), verbose=0)[:, 0]
np.testing.assert_allclose([row["prediction"] for row in found], wanted, 1e-4, 1e-5)
fitted.save(sys.argv[1] + "/numbers")
"""


@pytest.mark.timeout(900)  # three processes import TensorFlow, and others use the cores
@pytest.mark.usefixtures("spark")  # load() asks for it
def test_on_tensorflow(tmp_path: Path) -> None:
    """Fits without a store and from files equal plain Keras on the same rows; transform, saving, nulls, errors."""
    pytest.importorskip("tensorflow")
    configure(tmp_path)
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "SPARK_CONF_DIR": str(tmp_path)}
    command = [sys.executable, "-c", ON_TENSORFLOW, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    with pytest.raises(ModelError, match=r"needs Keras on tensorflow, .* set KERAS_BACKEND=tensorflow"):
        KerasModel.load(str(tmp_path / "numbers")).getModel()


def test_text_on_torch_is_refused_with_what_to_do(df: DataFrame) -> None:
    text = df.selectExpr("CAST(row AS string) AS city", "value")
    message = r"column 'city' has the type string, .*StringIndexer.*KERAS_BACKEND=tensorflow"
    with pytest.raises(DataError, match=message):
        estimator(net(), feature_cols=["city"]).fit(text)
