"""TextClassifier: text to classes of every kind, tokenizers, messages about mistakes; a model of peft."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from pyspark.ml.linalg import DenseVector
from pyspark.sql import functions as F  # noqa: N812
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators import ModelError, SparkBackend, TextClassificationModel, TextClassifier
from spark_hvd.estimators.classifiers.tokens import Tokens, as_tokenizer, trained_tokenizer
from spark_hvd.runner.config import PRELOAD
from spark_hvd.store import CheckpointError
from tests.conftest import workers_with
from tests.spark.estimator_support import Watched

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.slow

WORDS = {"fruit": ["apple", "pear", "plum"], "tree": ["oak", "elm", "ash"], "wind": ["gale", "storm", "breeze"]}
HEAVY = "transformers.models.bert.modeling_bert"
"""What ranks and workers would import: three seconds of CPU each."""


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> Iterator[SparkSession]:
    with workers_with(spark, HEAVY):
        yield spark


@pytest.fixture(scope="module")
def texts(spark: SparkSession) -> DataFrame:
    """240 texts of 1 to 9 words; each with its class as text, as a number, and whether it has each of three words."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(240):
        kind = [*WORDS][number % 3]
        words = [
            str(draw.choice(WORDS[kind])),
            *(str(draw.choice(["a", "the", "of", "in"])) for _ in range(number % 9)),
        ]
        draw.shuffle(words)
        rows.append((number, " ".join(words), kind, number % 3 * 10, [float(word in words) for word in WORDS["fruit"]]))
    return spark.createDataFrame(rows, "id int, text string, kind string, code int, has array<float>").cache()


def config(**changed: Any) -> BertConfig:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertConfig(
        **{**small, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "initializer_range": 0.2, **changed}
    )


def classifier(**changed: Any) -> TextClassifier:
    settings: dict[str, Any] = {
        "model": config(),
        "text_col": "text",
        "label_col": "kind",
        "backend": SparkBackend(2, env={PRELOAD: f"{os.environ[PRELOAD]},{HEAVY}"}, verbose=0),
        "epochs": 12,
        "batch_size": 16,
        "learning_rate": 0.01,
        "random_seed": 3,
        "vocab_size": 256,
        "verbose": 0,
    }
    return TextClassifier(**{**settings, **changed})


def whole_words() -> Tokenizer:
    """A tokenizer of the tokenizers library: one token per word, for those that matter."""
    words = ["[PAD]", "[UNK]", *(word for some in WORDS.values() for word in some)]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


@pytest.fixture(scope="module")
def trained(texts: DataFrame) -> TextClassificationModel:
    return classifier(validation=0.2).fit(texts)


def test_text_to_classes_and_back(trained: TextClassificationModel, texts: DataFrame, tmp_path: Path) -> None:
    assert trained.classes == ["fruit", "tree", "wind"]
    last = trained.getHistory()[-1]
    assert last["val_accuracy"] > 0.9
    assert 0 < last["lr"] < 0.01
    found = trained.transform(texts).orderBy("id")
    rows = found.collect()
    assert sum(row.prediction == row.kind for row in rows) > 220
    assert found.schema["prediction"].dataType.simpleString() == "string"
    assert isinstance(rows[0].probability, DenseVector)
    np.testing.assert_allclose([sum(row.probability) for row in rows], 1, rtol=1e-5)

    trained.write().overwrite().save(str(tmp_path / "ours"))
    again = TextClassificationModel.load(str(tmp_path / "ours"))
    assert again.classes == trained.classes
    few = texts.where("id < 9")
    probabilities = [row.probability for row in trained.transform(few).collect()]
    assert [row.probability for row in again.transform(few).collect()] == probabilities

    # Transformers writes a model to continue from, with its tokenizer
    trained.getModel().save_pretrained(tmp_path / "theirs")
    trained.getTokenizer().save_pretrained(tmp_path / "theirs")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs")
    assert model.config.id2label == {0: "fruit", 1: "tree", 2: "wind"}
    inputs = as_tokenizer(str(tmp_path / "theirs"))([rows[5].text], return_tensors="pt")
    np.testing.assert_allclose(model(**inputs).logits.softmax(1).tolist()[0], rows[5].probability, rtol=1e-3, atol=1e-5)
    assert not model.training


def test_a_folder_to_go_on_from(trained: TextClassificationModel, texts: DataFrame, tmp_path: Path) -> None:
    trained.getModel().save_pretrained(tmp_path)
    trained.getTokenizer().save_pretrained(tmp_path)
    further = classifier(model=str(tmp_path), epochs=1, learning_rate=None).fit(texts)
    assert further.getHistory()[0]["accuracy"] > 0.9


def test_a_run_comes_back_with_its_tokenizer_and_its_classes(texts: DataFrame, tmp_path: Path) -> None:
    once = {"store": str(tmp_path), "run_id": "once"}
    first, again = (classifier(epochs=1, **once).fit(texts) for _ in range(2))
    # No two trainings number tokens alike, but the weights are for those of the first.
    assert again.getTokenizer().get_vocab() == first.getTokenizer().get_vocab()
    few = texts.where("id < 9")
    probabilities = [row.probability for row in first.transform(few).collect()]
    assert [row.probability for row in again.transform(few).collect()] == probabilities
    further = classifier(epochs=2, **once).fit(texts)
    assert further.getTokenizer().get_vocab() == first.getTokenizer().get_vocab()
    assert len(further.getHistory()) == 2
    passed = {"tokenizer": first.getTokenizer(), "store": str(tmp_path), "run_id": "passed"}
    classifier(epochs=1, **passed).fit(texts)
    with pytest.raises(CheckpointError, match=r"run_id='passed' has a checkpoint, but not with a tokenizer .*pass the"):
        classifier(epochs=2, **{**passed, "tokenizer": None}).fit(texts)
    others = texts.withColumn("kind", F.replace("kind", F.lit("wind"), F.lit("air")))
    with pytest.raises(CheckpointError, match=r"for other classes: \['fruit', 'tree', 'wind'\] then, \['air', 'fruit'"):
        classifier(epochs=3, **once).fit(others)


def test_texts_are_cut_on_the_side_that_the_tokenizer_cuts() -> None:
    words = as_tokenizer(whole_words())
    words.truncation_side = "left"
    text = "apple oak gale elm ash"
    ours = Tokens.of(words, ["input_ids"], 3)([text], False)["input_ids"].tolist()
    assert ours == words([text], truncation=True, max_length=3)["input_ids"]


@pytest.mark.night
def test_several_classes_a_row_and_a_tokenizer_of_words(texts: DataFrame) -> None:
    several = classifier(label_col="has", tokenizer=whole_words(), max_length=12, epochs=10, backend=Watched())
    model = several.setThreshold(0.4).fit(texts)
    assert model.classes == []
    rows = model.transform(texts).where("kind = 'fruit'").collect()
    right = np.mean([np.array_equal(row.prediction, row.has) for row in rows])
    assert right > 0.9
    assert model.transform(texts).schema["prediction"].dataType.simpleString() == "array<float>"
    assert np.array_equal(np.array(rows[0].probability) >= 0.4, np.array(rows[0].prediction) > 0)


def test_numbers_as_labels_are_what_evaluators_take(trained: TextClassificationModel, texts: DataFrame) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    model = classifier(label_col="code", epochs=1, probability_col="").fit(texts)
    assert model.classes == [0, 10, 20]
    found = model.transform(texts)
    assert "probability" not in found.columns
    assert {row.prediction for row in found.collect()} <= {0.0, 10.0, 20.0}
    assert 0 <= MulticlassClassificationEvaluator(labelCol="code", metricName="accuracy").evaluate(found) <= 1


def test_peft_trains_its_adapters_alone(texts: DataFrame) -> None:
    peft = pytest.importorskip("peft")
    tokenizer = trained_tokenizer([row.text for row in texts.collect()], 256)
    torch.manual_seed(0)
    base = BertForSequenceClassification(config(vocab_size=len(tokenizer), num_labels=3))
    before = {name: value.clone() for name, value in base.state_dict().items()}
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    wrapped = peft.get_peft_model(base, lora)
    model = classifier(model=wrapped, tokenizer=tokenizer, epochs=2, learning_rate=0.05).fit(texts).getModel()
    after = {
        name.removeprefix("base_model.model.").replace("base_layer.", ""): value
        for name, value in model.state_dict().items()
    }
    same = [name for name, value in before.items() if name in after and torch.equal(value, after[name])]
    assert len(same) > 15
    assert not any("classifier" in name for name in same)
    changed = {name for name, value in model.named_parameters() if value.requires_grad}
    assert all("lora" in name or "classifier" in name for name in changed)
    assert any(value.abs().sum() > 0 for name, value in model.named_parameters() if "lora_B" in name)


def with_nulls(texts: DataFrame, column: str) -> DataFrame:
    return texts.withColumn(column, F.when(F.col("id") % 100 > 0, F.col(column)))


@pytest.mark.parametrize("column", ["text", "kind", "has"])
def test_nulls_are_counted_before_ranks_start(texts: DataFrame, column: str) -> None:
    label = "has" if column == "has" else "kind"
    with pytest.raises(DataError, match=rf"column '{column}' has 3 null\(s\) in 240 rows"):
        classifier(label_col=label).fit(with_nulls(texts, column))


def test_a_null_that_comes_later_is_named_with_its_column(trained: TextClassificationModel, texts: DataFrame) -> None:
    with pytest.raises(Exception, match=r"column 'text' in predict has 3 null\(s\) in"):
        trained.transform(with_nulls(texts, "text").coalesce(1)).collect()


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"text_col": "txt"}, DataError, "text_col names 'txt', which the DataFrame does not have.*'text'"),
        ({"text_col": "code"}, DataError, "text_col='code' is of type int: expected string"),
        ({"label_col": "constant"}, DataError, "one value only, 'x': expected from 2 to"),
        ({"label_col": "when"}, DataError, "label column 'when' is of type date: expected"),
        ({"label_col": "other"}, DataError, "label column 'other' has 240 arrays with other values than 0 and 1"),
        ({"label_col": "ragged"}, DataError, "label column 'ragged' has arrays of 1 to 2 values"),
        ({"model": 3}, TypeError, "model=3: expected a sequence classification model of transformers"),
        ({"model": "/nowhere"}, ValueError, "there is no such folder"),
        ({"model": None}, ValueError, "model is missing: TextClassifier needs it"),
        ({"tokenizer": 3}, ValueError, "tokenizer=3: expected a fast tokenizer"),
        ({"tokeniser": 3}, TypeError, "no parameter 'tokeniser'.*tokenizer"),
    ],
)
def test_mistakes(texts: DataFrame, changed: dict[str, Any], error: type[Exception], said: str) -> None:
    more = texts.withColumns(
        {
            "constant": F.lit("x"),
            "when": F.current_date(),
            "other": F.array(F.lit(2)),
            "ragged": F.when(F.col("id") > 5, F.array(F.lit(1))).otherwise(F.array(F.lit(1), F.lit(0))),
        }
    )
    with pytest.raises(error, match=said):
        classifier(**changed).fit(more)


def test_a_model_that_does_not_fit(texts: DataFrame) -> None:
    model = BertForSequenceClassification(config(vocab_size=64, num_labels=2))
    with pytest.raises(ValueError, match="tokenizer is missing: this model needs the tokenizer"):
        classifier(model=model).fit(texts)
    with pytest.raises(ModelError, match="num_labels=2, but column 'kind' has 3 classes"):
        classifier(model=model, tokenizer=whole_words()).fit(texts)
    model = BertForSequenceClassification(config(vocab_size=8, num_labels=3))
    with pytest.raises(ModelError, match="tokenizer has 11 tokens, but model has embeddings for 8"):
        classifier(model=model, tokenizer=whole_words()).fit(texts)


def test_classes_that_change_from_one_look_to_the_next(texts: DataFrame) -> None:
    drawn = F.udf(lambda: uuid.uuid4().hex).asNondeterministic()
    with pytest.raises(DataError, match=r"column 'kind' has values that were missing when fit collected.*cache"):
        classifier(epochs=1).fit(texts.withColumn("kind", drawn()))
