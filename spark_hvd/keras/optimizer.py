"""DistributedOptimizer: a Keras optimizer whose gradients are reduced over all ranks before each step."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from spark_hvd.collectives.compression import Compression, GradientCompressor
from spark_hvd.collectives.process_set import ProcessSet, global_process_set
from spark_hvd.keras.exchange import GradientExchange, overwritten
from spark_hvd.torch.optimizer.arguments import check_passes
from spark_hvd.transport.communicator import ReduceOp


class DistributedKerasOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc] # Any
    """Methods that DistributedOptimizer adds to its optimizer."""

    _exchange: GradientExchange

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable's gradients from reduction.

        Raises:
            RuntimeError: Gradients have been reduced already.
        """
        if self._exchange.reducer is not None:
            raise RuntimeError(
                "register_local_var() was called after the first step: call it before training, on every rank."
            )
        self._exchange.local.add(id(var))

    def weigh(self, weight: float) -> Any:
        """Multiply the coming losses by a weight; on all ranks, from before the first step on, 1.0 by default.

        A rank whose batch has fewer rows than others' needs a smaller weight: its rows, times the number of ranks,
        divided by the rows of all. Then the step equals that of the whole batch. With op=Sum, the weight is its rows
        divided by the rows of all.

        Returns:
            The variable that holds the weight.
        """
        if self._exchange.weight is None:
            self._exchange.weight = keras.Variable(1.0, trainable=False, dtype="float32", name="weight")
        self._exchange.weight.assign(weight)
        return self._exchange.weight

    def overflow_as_half(self, variables: Iterable[Any]) -> None:
        """Make reduced gradients of these variables infinite if float16 cannot hold them.

        Ranks sum gradients in float32. One process that computes in float16 gets inf instead, and a LossScaleOptimizer
        skips the step.
        """
        self._exchange.half.update(map(id, variables))

    def scale_loss(self, loss: Any) -> Any:
        """See keras.Optimizer.scale_loss."""
        weight, reducer = self._exchange.weight, self._exchange.reducer
        scaled = super().scale_loss(loss if weight is None else loss * keras.ops.cast(weight, loss.dtype))
        followed = None if reducer is None or self.gradient_accumulation_steps else reducer.followed
        # Keras' own step calls backward once and passes all its gradients to apply. Other steps may do anything, and
        # whatever replaces apply of this object may change gradients.
        own_step = sys._getframe(1).f_code is keras.Model.train_step.__code__ and "apply" not in vars(self)
        if followed is not None and own_step:
            followed.begin(scaled)
        return scaled

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """See keras.Optimizer.apply."""
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if self.gradient_accumulation_steps:
            # A gradient that is missing here may exist on another rank.
            grads = [
                keras.ops.zeros_like(variable) if gradient is None else gradient
                for gradient, variable in zip(grads, variables, strict=True)
            ]
            self._exchange.given = [each for each in variables if not overwritten(each)]
        elif len(grads) == len(variables):  # otherwise Keras reports what is wrong
            reducer = self._exchange.open(self._trainable_variables or variables)
            grads = self._exchange.reduce(reducer, grads, variables)
        try:
            super().apply(grads, trainable_variables)
        finally:  # the step is over on all ranks, even if an error here is caught
            if self._exchange.reducer is not None and not self.gradient_accumulation_steps:
                self._exchange.reducer.stepped()

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # Keras calls this in steps that update variables, with the mean of the gradients accumulated until then.
        if self.gradient_accumulation_steps:
            reducer = self._exchange.open(self._trainable_variables)
            grads = self._exchange.reduce(reducer, grads, self._exchange.given)
            reducer.stepped()
        return super()._clip_gradients(grads)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: GradientCompressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make `optimizer` reduce gradients over all ranks. Call it on every rank; nothing is exchanged before a step.

    It returns the same object, now of a class with the same name and module, so models are saved, and can be loaded, as
    if it were not distributed. Ranks exchange gradients in steps that update variables, before gradients are clipped;
    if gradients are accumulated, that is one step in several. A step is a call of `apply`: its gradients may come from
    several backward passes, and a backward pass may produce gradients for variables of another optimizer.

    Under the policy mixed_float16, the optimizer is wrapped in a LossScaleOptimizer, which is returned: it skips a step
    on all ranks if one has a gradient that is not finite. In this case each batch's gradients are reduced.

    Args:
        optimizer: Any optimizer of Keras.
        name: Accepted for Horovod's sake; has no effect.
        device_dense: Accepted for Horovod's sake; has no effect.
        device_sparse: Accepted for Horovod's sake; has no effect.
        compression: `Compression.none`, `.fp16`, `.bf16` or an object with `compress` and `decompress`, which gets a
            one-dimensional bucket of gradients.
        sparse_as_dense: Reduce sparse gradients as dense ones. On the torch backend, all gradients are dense.
        gradient_predivide_factor: With Average, gradients are divided by it before the sum and by size / factor after.
        op: `Average` or `Sum`.
        backward_passes_per_step: Batches whose gradients are accumulated before a step. This is the optimizer's
            `gradient_accumulation_steps`, and is saved as such with a model.
        average_aggregated_gradients: Whether accumulated gradients are averaged over these batches, not summed.
        num_groups: Deprecated: use `groups`.
        groups: A number of groups, or lists of variables; each group is reduced in one piece.
        process_set: The ranks to reduce over; on other ranks the optimizer stays local.
        scale_local_gradients: With Average, divide the gradients of local variables by the number of ranks.

    Returns:
        `optimizer`, or a LossScaleOptimizer around it.

    Raises:
        ValueError: An argument is invalid; the message says why.
        TypeError: `optimizer` is not an optimizer of Keras.
    """
    if isinstance(optimizer, DistributedKerasOptimizer):
        raise ValueError("optimizer is already a DistributedOptimizer: wrap it once")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer={optimizer!r}: expected an optimizer of Keras, such as keras.optimizers.Adam()")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"op={op!r}: Keras' DistributedOptimizer supports Average and Sum")
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average, got op={op!r}")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, DistributedKerasOptimizer):
        raise ValueError(OUTSIDE)
    check_passes(backward_passes_per_step)
    if backward_passes_per_step > 1:
        if inner.gradient_accumulation_steps or inner.built:
            raise ValueError(
                f"backward_passes_per_step={backward_passes_per_step}: the optimizer accumulates gradients already "
                f"(gradient_accumulation_steps={inner.gradient_accumulation_steps}) or has been built; set one of the "
                "two, on a new optimizer."
            )
        inner.gradient_accumulation_steps = backward_passes_per_step
    if inner is optimizer and keras.config.dtype_policy().name == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    exchange = GradientExchange(
        op,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        groups if groups is not None else num_groups or None,
        process_set,
        1.0 if average_aggregated_gradients else float(backward_passes_per_step),
        scale_local_gradients,
    )
    base = type(optimizer)
    namespace = {"__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__}
    optimizer.__class__ = type(base.__name__, (DistributedKerasOptimizer, base), namespace)
    optimizer._exchange = exchange
    return optimizer


OUTSIDE = (
    "a LossScaleOptimizer was put around a DistributedOptimizer, so a rank whose gradients are not finite would skip a "
    "step and leave the others waiting. Wrap the other way round: "
    "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
)


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Make a :func:`DistributedOptimizer` that does not reduce the gradients of some layers.

    Args:
        optimizer: Any optimizer of Keras.
        *args: Arguments of DistributedOptimizer.
        local_layers: A built Keras layer, or several.
        **options: Further arguments of DistributedOptimizer.
    """
    distributed = DistributedOptimizer(optimizer, *args, **options)
    layers = [local_layers] if hasattr(local_layers, "trainable_weights") else list(local_layers or [])
    for variable in (variable for layer in layers for variable in layer.trainable_weights):
        distributed.register_local_var(variable)
    return distributed


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: GradientCompressor = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model that Keras has saved, and make its optimizer a DistributedOptimizer with the saved state.

    Args:
        filepath: A ``.keras`` file, or anything that ``keras.models.load_model`` accepts.
        custom_optimizers: Optimizer classes that are not Keras' own.
        custom_objects: Other names -> classes and functions that Keras needs to know.
        compression: Compression of gradients, see DistributedOptimizer.
        legacy_opts: For optimizers of Keras 2, which Keras 3 lacks; must be False.

    Raises:
        ValueError: `legacy_opts` is true, or Keras cannot load the model.
    """
    if legacy_opts:
        raise ValueError("legacy_opts=True: Keras 3 has no optimizers of Keras 2; save the model with new ones.")
    objects = {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
