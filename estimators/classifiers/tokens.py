"""Tokenizes text for a Transformers model, with a given tokenizer or one that is trained on the texts."""

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

_FIELDS = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
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
        """Return Tokens for a tokenizer of Transformers, which is not changed."""
        from tokenizers import Tokenizer

        fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        fast.enable_truncation(max_length, direction=tokenizer.truncation_side)
        fast.enable_padding(
            direction=tokenizer.padding_side,
            pad_id=tokenizer.pad_token_id,
            pad_type_id=tokenizer.pad_token_type_id,
            pad_token=tokenizer.pad_token,
        )
        return cls(fast, tuple(names))

    def __call__(self, values: list[Any], training: bool) -> dict[str, torch.Tensor]:
        rows = self.tokenizer.encode_batch_fast(values)
        return {name: torch.tensor([getattr(row, _FIELDS[name]) for row in rows], device="cpu") for name in self.names}


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
    return tuple(name for name in _FIELDS if name in known)


def trained_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a WordPiece tokenizer for lower-case text, like BERT's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token=_SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(_SPECIAL.values()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    sep, cls = ((token, list(_SPECIAL.values()).index(token)) for token in ("[SEP]", "[CLS]"))
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return _of_transformers(tokenizer, **_SPECIAL)


def as_tokenizer(given: Any) -> PreTrainedTokenizerFast:
    """Return ``given`` as a tokenizer of Transformers: one, a ``tokenizers.Tokenizer``, or the path of either.

    Raises:
        ValueError: ``given`` is something else, is not a fast tokenizer, or has no padding token.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = given
    if isinstance(given, str | os.PathLike):
        path = os.fspath(given)
        if os.path.isdir(path):
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        elif os.path.isfile(path):
            tokenizer = Tokenizer.from_file(path)
        else:
            raise ValueError(
                f"tokenizer={path!r}: there is no such folder or file. Nothing is downloaded: pass a folder that "
                "save_pretrained wrote, or a tokenizer.json"
            )
    if isinstance(tokenizer, Tokenizer):
        padding = tokenizer.padding or {}
        special = {name: token for name, token in _SPECIAL.items() if tokenizer.token_to_id(token) is not None}
        tokenizer = _of_transformers(
            tokenizer, **{**special, **({"pad_token": padding["pad_token"]} if padding else {})}
        )
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            f"tokenizer={given!r}: expected a fast tokenizer of transformers, a tokenizers.Tokenizer, or the path of "
            "one of these"
        )
    if tokenizer.pad_token is None:
        raise ValueError(
            "tokenizer has no padding token: set one, for example tokenizer.pad_token = tokenizer.eos_token, or call "
            "tokenizer.enable_padding(pad_id=0, pad_token='[PAD]')"
        )
    return cast("PreTrainedTokenizerFast", tokenizer)


def _of_transformers(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]
