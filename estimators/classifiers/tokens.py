"""Tokenisation of text for a Transformers model, by a given tokenizer or one trained on the texts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from spark_hvd.estimators.classifiers.training import Inputs

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_KINDS = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


@dataclass(frozen=True)
class Tokens(Inputs):
    """Turns texts into tokens, padded to the longest of the batch.

    Attributes:
        tokenizer: Truncates and pads texts. It must not be changed, because several threads use it.
        names: Names of the tensors, some of input_ids, token_type_ids and attention_mask, each (rows, tokens) int64.
    """

    tokenizer: Tokenizer
    names: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, names: Iterable[str], max_length: int) -> Tokens:
        """Make it from a tokenizer of Transformers, which is not changed."""
        from tokenizers import Tokenizer

        fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        fast.enable_truncation(max_length)
        fast.enable_padding(
            direction=tokenizer.padding_side,
            pad_id=tokenizer.pad_token_id,
            pad_type_id=tokenizer.pad_token_type_id,
            pad_token=tokenizer.pad_token,
        )
        return cls(fast, tuple(names))

    def __call__(self, values: list[Any], training: bool) -> dict[str, torch.Tensor]:
        rows = self.tokenizer.encode_batch_fast(values)
        return {name: torch.tensor([getattr(row, _KINDS[name]) for row in rows], device="cpu") for name in self.names}


class Logits(torch.nn.Module):
    """A Transformers model that takes tensors in the order of ``names`` and returns its logits (rows, classes)."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """See the class."""
        logits: torch.Tensor = self.model(**dict(zip(self.names, tensors, strict=True))).logits
        return logits


def names_of(model: Any) -> tuple[str, ...]:
    """Return the names of those tokenizer outputs that a model takes."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # models of peft take **kwargs
    known = inspect.signature(inner.forward).parameters
    return tuple(name for name in ("input_ids", "token_type_ids", "attention_mask") if name in known)


def trained_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a WordPiece tokenizer for lower-case text, like BERT's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    made = Tokenizer(models.WordPiece(unk_token=_SPECIAL["unk_token"]))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(_SPECIAL.values()), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    sep, cls = ((token, list(_SPECIAL.values()).index(token)) for token in ("[SEP]", "[CLS]"))
    made.post_processor = processors.BertProcessing(sep, cls)
    return _of_transformers(made, **_SPECIAL)


def as_tokenizer(given: Any) -> PreTrainedTokenizerFast:
    """Return the tokenizer of Transformers, given one, one of the tokenizers library, or the path of either.

    Raises:
        ValueError: It is something else, not a fast tokenizer, or has no padding token.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    found = given
    if isinstance(given, str | os.PathLike):
        path = os.fspath(given)
        if os.path.isdir(path):
            found = AutoTokenizer.from_pretrained(path, local_files_only=True)
        elif os.path.isfile(path):
            found = Tokenizer.from_file(path)
        else:
            raise ValueError(
                f"tokenizer={path!r}: there is no such folder or file. Nothing is downloaded: give a folder that "
                "save_pretrained wrote, or a tokenizer.json"
            )
    if isinstance(found, Tokenizer):
        padding = found.padding or {}
        there = {name: token for name, token in _SPECIAL.items() if found.token_to_id(token) is not None}
        found = _of_transformers(found, **{**there, **({"pad_token": padding["pad_token"]} if padding else {})})
    if not hasattr(found, "backend_tokenizer"):
        raise ValueError(
            f"tokenizer={given!r}: expected a fast tokenizer of transformers, a tokenizers.Tokenizer, or the path of "
            "one of these"
        )
    if found.pad_token is None:
        raise ValueError(
            "tokenizer has no padding token: set one, for example by tokenizer.pad_token = tokenizer.eos_token, or by "
            "tokenizer.enable_padding(pad_id=0, pad_token='[PAD]')"
        )
    return cast("PreTrainedTokenizerFast", found)


def _of_transformers(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]
