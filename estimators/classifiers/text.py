"""``TextClassifier`` trains a model of Transformers to classify a column of text."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from spark_hvd.data.readers.errors import DataError
from spark_hvd.estimators.classifiers.estimator import NeuralClassifier, Prepared, derived_before
from spark_hvd.estimators.classifiers.labels import Labels
from spark_hvd.estimators.classifiers.model import NeuralClassificationModel
from spark_hvd.estimators.classifiers.tables import estimator_table, model_table
from spark_hvd.estimators.classifiers.tokens import Logits, Tokens, as_tokenizer, names_of, trained_tokenizer
from spark_hvd.estimators.errors import ModelError
from spark_hvd.estimators.params import checks as c
from spark_hvd.estimators.params.params import rows
from spark_hvd.runner.spark.names import job_named
from spark_hvd.runner.spark.series import quoted
from spark_hvd.store.errors import CheckpointError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

_MAX_TEXTS = 200_000
"""The approximate number of texts that a new tokenizer is trained on."""
_MAX_TOKENS = 512
_TOKENIZER = "The tokenizer of the model."
_MAX_LENGTH = ("max_length", None, c.whole(1), "Maximum tokens per text; by default the model's limit, at most 512.")


def _model_or_config(name: str, value: Any) -> Any:
    if not isinstance(value, str | os.PathLike) and not (hasattr(value, "config") or hasattr(value, "to_diff_dict")):
        raise TypeError(
            f"{name}={value!r}: expected a sequence classification model of transformers, its config, or the path of a "
            "saved model"
        )
    return value


class TextClassificationModel(NeuralClassificationModel):
    """A trained classifier of text: ``transform`` appends the class and the probabilities of all classes.

    ``getModel()`` returns the Transformers model, ``getTokenizer()`` its tokenizer. Call ``save_pretrained(folder)`` on
    both to use them without spark_hvd.

    A saved model contains a pickle of the model's code: only load models that you trust.
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
    """Trains a Transformers model to classify texts, on several ranks.

        model = TextClassifier(model=config, text_col="title", label_col="genre", num_proc=8).fit(df)
        model.transform(df).select("genre", "prediction", "probability")

    Ranks get raw text, tokenise it, and pad each batch to its longest text. Labels are text, numbers or booleans, or
    arrays with 0 or 1 for each class if a text may have several classes (multi-label).

    ``model`` is a config, from which a model with random weights is made; the folder of a saved model; or a model,
    possibly wrapped by peft. Only parameters with ``requires_grad`` are trained. If ``tokenizer`` is not given, the one
    in the model's folder is used; for a config, one is trained on the texts. Nothing is downloaded.

    Raises:
        TypeError, ValueError: A parameter is unknown or its value is not allowed.
    """

    __module__ = "spark_hvd.estimators"

    _table: ClassVar = estimator_table(
        *rows(
            "Model and columns",
            (
                "model",
                None,
                _model_or_config,
                "A sequence classification model of transformers, its config, or the path of a saved model.",
            ),
            ("text_col", None, c.text, "Column of text."),
            ("label_col", None, c.text, "Column of classes: text, numbers, booleans, or arrays of 0 and 1."),
            (
                "tokenizer",
                None,
                c.anything,
                "A fast tokenizer of transformers, a tokenizers.Tokenizer, or a path; by default the one in the "
                "model's folder, or a new one for a config.",
            ),
            ("vocab_size", 16_384, c.whole(256), "Maximum number of tokens of a new tokenizer."),
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
        derived: dict[str, Any] = {}
        is_path = isinstance(given, str | os.PathLike)
        if tokenizer is not None or is_path:
            tokenizer = as_tokenizer(given if tokenizer is None else tokenizer)
        elif isinstance(given, torch.nn.Module):
            raise ValueError(
                "tokenizer is missing: this model needs the tokenizer it was trained with. Pass that one, or pass a "
                "config as model, for which a new tokenizer is trained"
            )
        elif (before := derived_before(settings)) is not None:
            # A new one would number tokens differently, even for the same texts.
            from tokenizers import Tokenizer

            if "tokenizer" not in before:
                raise CheckpointError(
                    f"run_id={settings['run_id']!r} has a checkpoint, but not with a tokenizer that fit trained: pass "
                    "the tokenizer= with which the run was started, or another run_id"
                )
            derived = {"tokenizer": before["tokenizer"]}
            tokenizer = as_tokenizer(Tokenizer.from_str(before["tokenizer"]))
        else:
            tokenizer = trained_tokenizer(_texts(dataset, settings["text_col"]), settings["vocab_size"])
            derived = {"tokenizer": tokenizer.backend_tokenizer.to_str()}
        if is_path:
            model = _load_model(os.fspath(given), labels)
        else:
            model = given if isinstance(given, torch.nn.Module) else _new_model(given, labels, tokenizer)
        _check_fits(model, labels, tokenizer)
        is_new = not is_path and model is not given
        return Prepared(
            Logits(model, names_of(model)),
            tokens_of(model, tokenizer, settings["max_length"]),
            learning_rate=1e-3 if is_new else 5e-5,
            fields={"tokenizer": tokenizer, "max_length": settings["max_length"]},
            derived=derived,
        )

    def _unwrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        inner: torch.nn.Module = model.model  # type: ignore[assignment] # torch declares modules or tensors
        return inner


def tokens_of(model: Any, tokenizer: PreTrainedTokenizerFast, max_length: int | None) -> Tokens:
    """Return the function that turns texts into the model's tensors."""
    limit = getattr(model.config, "max_position_embeddings", None) or _MAX_TOKENS
    return Tokens.of(tokenizer, names_of(model), max_length or min(_MAX_TOKENS, limit, tokenizer.model_max_length))


def _texts(dataset: DataFrame, column: str) -> list[str]:
    texts = dataset.select(quoted(column))
    with job_named(texts, "spark_hvd: TextClassifier reads texts for a tokenizer"):
        share = _MAX_TEXTS / max(1, texts.count())
        some = texts if share >= 1 else texts.sample(fraction=share, seed=0)
        return [row[0] for row in some.collect()]


def _head(labels: Labels) -> dict[str, Any]:
    """Return the entries of a config that describe the classes."""
    names = [str(each) for each in labels.classes] or [f"LABEL_{number}" for number in range(labels.size)]
    kind = "single_label_classification" if labels.classes else "multi_label_classification"
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": kind,
    }


def _new_model(config: PretrainedConfig, labels: Labels, tokenizer: PreTrainedTokenizerFast) -> Any:
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(config)
    for name, value in _head(labels).items():
        setattr(config, name, value)
    for name in ("pad", "cls", "sep", "bos", "eos"):
        if hasattr(config, f"{name}_token_id"):
            setattr(config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    config.vocab_size = len(tokenizer)
    return AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]


def _load_model(path: str, labels: Labels) -> Any:
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
            f"model has num_labels={model.config.num_labels}, but column {labels.column!r} has {labels.size} classes: "
            f"make the model with num_labels={labels.size}"
        )
    tokens = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > tokens:
        raise ModelError(
            f"tokenizer has {len(tokenizer)} tokens, but model has embeddings for {tokens}: pass the tokenizer that it "
            "was trained with, or call model.resize_token_embeddings(len(tokenizer))"
        )
