"""``TextClassifier``: a column of text to classes, by a model of Transformers."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.classifiers.estimator import NeuralClassifier, Prepared
from spark_hvd.estimators.classifiers.labels import Labels
from spark_hvd.estimators.classifiers.model import NeuralClassificationModel
from spark_hvd.estimators.classifiers.tables import estimator_table, model_table
from spark_hvd.estimators.classifiers.tokens import Logits, Tokens, as_tokenizer, names_of, trained_tokenizer
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.params import checks as c
from spark_hvd.estimators.params.params import rows
from spark_hvd.runner.spark.names import job_named
from spark_hvd.runner.spark.series import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

TEXTS = 200_000
"""So many texts, about, are looked at for a tokenizer."""
LONGEST = 512
_TOKENIZER = "Cuts texts into tokens."
_MAX_LENGTH = ("max_length", None, c.whole(1), "Tokens after which a text is cut; by default the model's, at most 512.")


def _model_or_config(name: str, value: Any) -> Any:
    if not isinstance(value, str | os.PathLike) and not (hasattr(value, "config") or hasattr(value, "to_diff_dict")):
        raise TypeError(
            f"{name}={value!r}: expected a model of transformers for sequence classification, a config of one, or the "
            "path of a saved one"
        )
    return value


class TextClassificationModel(NeuralClassificationModel):
    """A trained classifier of text: ``transform`` appends the class and the probabilities of all classes.

    ``getModel()`` is the model of Transformers, ``getTokenizer()`` its tokenizer; ``save_pretrained(folder)`` of both
    writes what Transformers reads without spark_hvd.

    A saved model holds a pickle of the model's code: only load models that you trust.
    """

    __module__ = "spark_hvd.estimators"

    _table: ClassVar = model_table(
        *rows(
            "Model",
            ("model", None, c.instance("a torch.nn.Module", "parameters", "eval", "state_dict"), "The trained model."),
            ("tokenizer", None, c.anything, _TOKENIZER),
            ("text_col", None, c.text, "Column of text."),
            _MAX_LENGTH,
        )
    )
    _column: ClassVar = "text_col"

    def _inputs(self, settings: Mapping[str, Any]) -> Tokens:
        return tokens_of(settings["model"], settings["tokenizer"], settings["max_length"])

    def _wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        return Logits(model, names_of(model))


class TextClassifier(NeuralClassifier[TextClassificationModel]):
    """Trains a model of Transformers to tell the class of a text, on several ranks.

        model = TextClassifier(model=config, text_col="title", label_col="genre", num_proc=8).fit(df)
        model.transform(df).select("genre", "prediction", "probability")

    Ranks get the text as it is, make tokens of it, and pad batches to their longest text. Labels are text, numbers or
    booleans; or arrays with 0 or 1 for each class, where a text may have several (multi-label).

    ``model`` is a config, of which a model is made with random weights; the folder of a saved one; or a model, also
    one that peft has wrapped: only parameters with ``requires_grad`` are trained. Without ``tokenizer``, that in the
    model's folder is used, and for a config one is trained on the texts. Nothing is downloaded.

    Raises:
        TypeError, ValueError: a parameter is unknown or its value is not allowed.
    """

    __module__ = "spark_hvd.estimators"

    _table: ClassVar = estimator_table(
        *rows(
            "Model and columns",
            ("model", None, _model_or_config, "A model of transformers for sequence classification, a config, a path."),
            ("text_col", None, c.text, "Column of text."),
            ("label_col", None, c.text, "Column of classes: text, numbers, booleans, or arrays of 0 and 1."),
            ("tokenizer", None, c.anything, "A fast tokenizer of transformers, a tokenizers.Tokenizer, or a path."),
            ("vocab_size", 16_384, c.whole(256), "Tokens of the tokenizer that is trained, at most."),
            _MAX_LENGTH,
        )
    )
    _column: ClassVar = "text_col"
    _model_class: ClassVar = TextClassificationModel

    def _check(self, dataset: DataFrame, settings: Mapping[str, Any]) -> None:
        name = settings["text_col"]
        kind = dataset.schema[name].dataType.simpleString()
        if kind != "string":
            raise DataError(f"text_col={name!r} is of type {kind}: expected string")

    def _prepared(self, dataset: DataFrame, settings: Mapping[str, Any], labels: Labels) -> Prepared:
        given, tokenizer = settings["model"], settings["tokenizer"]
        is_path = isinstance(given, str | os.PathLike)
        if tokenizer is not None or is_path:
            tokenizer = as_tokenizer(given if tokenizer is None else tokenizer)
        elif isinstance(given, torch.nn.Module):
            raise ValueError(
                "tokenizer is missing: a model that is there already knows the tokens of one only. Give that one; for "
                "a config in place of the model, one is trained"
            )
        else:
            tokenizer = trained_tokenizer(_texts(dataset, settings["text_col"]), settings["vocab_size"])
        if is_path:
            model = _loaded(os.fspath(given), labels)
        else:
            model = given if isinstance(given, torch.nn.Module) else _made(given, labels, tokenizer)
        _check_fits(model, labels, tokenizer)
        fresh = not is_path and model is not given
        return Prepared(
            Logits(model, names_of(model)),
            tokens_of(model, tokenizer, settings["max_length"]),
            learning_rate=1e-3 if fresh else 5e-5,
            fields={"tokenizer": tokenizer, "max_length": settings["max_length"]},
        )

    def _unwrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        found: torch.nn.Module = model.model  # type: ignore[assignment] # torch declares modules or tensors
        return found


def tokens_of(model: Any, tokenizer: PreTrainedTokenizerFast, max_length: int | None) -> Tokens:
    """What makes a model's tensors of text."""
    most = getattr(model.config, "max_position_embeddings", None) or LONGEST
    return Tokens.of(tokenizer, names_of(model), max_length or min(LONGEST, most, tokenizer.model_max_length))


def _texts(dataset: DataFrame, column: str) -> list[str]:
    texts = dataset.select(quoted(column))
    with job_named(texts, "spark_hvd: TextClassifier reads texts for a tokenizer"):
        share = TEXTS / max(1, texts.count())
        some = texts if share >= 1 else texts.sample(fraction=share, seed=0)
        return [row[0] for row in some.collect()]


def _head(labels: Labels) -> dict[str, Any]:
    """What a config says of the classes."""
    names = [str(each) for each in labels.classes] or [f"LABEL_{number}" for number in range(labels.size)]
    kind = "single_label_classification" if labels.classes else "multi_label_classification"
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": kind,
    }


def _made(config: PretrainedConfig, labels: Labels, tokenizer: PreTrainedTokenizerFast) -> Any:
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(config)
    for name, value in _head(labels).items():
        setattr(config, name, value)
    for name in ("pad", "cls", "sep", "bos", "eos"):
        if hasattr(config, f"{name}_token_id"):
            setattr(config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    config.vocab_size = len(tokenizer)
    return AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]


def _loaded(path: str, labels: Labels) -> Any:
    from transformers import AutoModelForSequenceClassification

    if not os.path.isdir(path):
        raise ValueError(f"model={path!r}: there is no such folder. Expected one that save_pretrained wrote")
    try:
        return AutoModelForSequenceClassification.from_pretrained(path, local_files_only=True, **_head(labels))
    except Exception as error:
        raise ModelError(f"model={path!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _check_fits(model: Any, labels: Labels, tokenizer: PreTrainedTokenizerFast) -> None:
    if model.config.num_labels != labels.size:
        raise ModelError(
            f"model has num_labels={model.config.num_labels}, and column {labels.column!r} {labels.size} classes: "
            f"make it with num_labels={labels.size}"
        )
    tokens = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > tokens:
        raise ModelError(
            f"tokenizer has {len(tokenizer)} tokens and model embeddings of {tokens}: give the tokenizer that it was "
            "trained with, or call model.resize_token_embeddings(len(tokenizer))"
        )
