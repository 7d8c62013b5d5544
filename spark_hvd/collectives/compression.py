"""Compression: sends wide floating-point numbers as 16-bit ones, which at least halves the traffic."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch


class GradientCompressor(Protocol):
    """What ``compression=`` accepts: a class or object with these two methods."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and any context for `decompress`."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Undo `compress` on the reduced tensor."""


class Compressor:
    """Base class of compressors. Any class or object with these two methods works as well."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Compress a tensor of any dtype.

        Returns:
            The tensor to reduce, and a context for :meth:`decompress`.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Undo :meth:`compress` on the reduced tensor, given the context that it returned."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class _Half(Compressor):
    _dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        wide = tensor.is_floating_point() and tensor.element_size() > 2
        return tensor.to(cls._dtype) if wide else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(_Half):
    """Sends floating-point numbers wider than 16 bits as IEEE half precision: 11 bits of precision, up to 65504."""

    _dtype = torch.float16


class BF16Compressor(_Half):
    """Sends floating-point numbers wider than 16 bits as bfloat16: 8 bits of precision, the range of float32."""

    _dtype = torch.bfloat16


class Compression:
    """The compressors that come with spark_hvd, for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
