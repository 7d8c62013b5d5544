"""Compressors for TensorFlow's tensors as well as torch's: programs call them directly, as they call Horovod's."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf
import torch

from spark_hvd.collectives import compression


class _ForBothFrameworks(compression.Compressor):
    _torch_compressor: ClassVar[type[compression.Compressor]]
    _dtype: ClassVar[Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if isinstance(tensor, torch.Tensor):
            return cls._torch_compressor.compress(tensor)
        wide = tensor.dtype.is_floating and tensor.dtype.size > 2
        return tf.cast(tensor, cls._dtype) if wide else tensor, tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return (
            cls._torch_compressor.decompress(tensor, ctx) if isinstance(tensor, torch.Tensor) else tf.cast(tensor, ctx)
        )


class TensorFlowFP16Compressor(_ForBothFrameworks):
    """Sends floating-point numbers wider than 16 bits as IEEE half precision."""

    _torch_compressor, _dtype = compression.FP16Compressor, tf.float16


class TensorFlowBF16Compressor(_ForBothFrameworks):
    """Sends floating-point numbers wider than 16 bits as bfloat16."""

    _torch_compressor, _dtype = compression.BF16Compressor, tf.bfloat16


class TensorFlowCompression:
    """The compressors that come with spark_hvd, for ``compression=``."""

    none = compression.NoneCompressor
    fp16 = TensorFlowFP16Compressor
    bf16 = TensorFlowBF16Compressor
