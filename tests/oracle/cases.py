"""A case of the oracle, and how hypothesis generates it: data only, so that a case prints itself."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

DENSE = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "ASGD",
    "Rprop",
    "Adafactor",
    "LBFGS",
)
FOR_SPARSE = ("SGD", "Adagrad")
BETWEEN_STEPS = (
    "cast there and back",
    "cast for good",
    "channels_last",
    "contiguous",
    "re-point the parameter",
    "freeze",
    "unfreeze",
    "add_param_group",
    "load_state_dict",
)
ON_GRADS = (
    "grad.data = clone",
    "grad.set_",
    "grad = clone",
    "grad = detach",
    "grad = None",
    "grad.data transposed",
    "grads swapped",
)
ZEROING = (
    "optimizer to None",
    "optimizer in place",
    "model to None",
    "model in place",
)


@dataclass(frozen=True)
class Step:
    """One step: actions before gradients are zeroed, how they are, actions after that, and between passes.

    Attributes:
        before: Names of :data:`BETWEEN_STEPS` and :data:`ON_GRADS`.
        zeroing: One of :data:`ZEROING`.
        after: As `before`.
        between_passes: Names of :data:`ON_GRADS`.
        end: "step", or "skip", a backward without a step, or "sam": a step, a move uphill, and another step.
        branch: Which ranks use all of the model's layers: "all", "none" or "some", which means odd ranks.
    """

    before: tuple[str, ...]
    zeroing: str
    after: tuple[str, ...]
    between_passes: tuple[str, ...]
    end: str
    branch: str


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        ranks: World size.
        seed: Seed of weights and rows.
        dtype: "float64" or "mixed".
        parts: Parts of the model, see :class:`tests.oracle.training.Net`; "ema": weights are averaged; "split": each
            backward has two calls, for different parameters.
        loss: Name of a loss in torch.nn.functional.
        reduction: Reduction of the loss.
        optimizer: Name of an optimizer in torch.optim.
        optimizers: Number of optimizers that share the parameters.
        passes: Backward passes per step.
        clip: Whether gradients are clipped.
        bucket_cap_mb: Option of DistributedOptimizer.
        shared_memory: Option of DistributedOptimizer.
        steps: The steps, in order.
    """

    ranks: int
    seed: int
    dtype: str
    parts: frozenset[str]
    loss: str
    reduction: str
    optimizer: str
    optimizers: int
    passes: int
    clip: bool
    bucket_cap_mb: float | None
    shared_memory: bool
    steps: tuple[Step, ...]


def _some(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(names), max_size=2).map(tuple)


STEPS = st.builds(
    Step,
    before=_some(BETWEEN_STEPS + ON_GRADS),
    zeroing=st.sampled_from(ZEROING),
    after=_some(BETWEEN_STEPS + ON_GRADS),
    between_passes=_some(ON_GRADS),
    end=st.sampled_from(("step", "step", "step", "skip", "sam")),
    branch=st.sampled_from(("all", "none", "some")),
)


@st.composite
def cases(draw: st.DrawFn, most_steps: int) -> Case:
    """Generate any case of up to so many steps."""
    parts = draw(st.sets(st.sampled_from(("tied", "sparse", "frozen norm", "sync norm", "checkpoint", "ema", "split"))))
    optimizer = draw(st.sampled_from(FOR_SPARSE if "sparse" in parts else DENSE))
    return Case(
        ranks=draw(st.sampled_from((2, 2, 2, 3))),
        seed=draw(st.integers(0, 1 << 16)),
        dtype=draw(st.sampled_from(("float64", "float64", "mixed"))),
        parts=frozenset(parts),
        loss=draw(st.sampled_from(("mse_loss", "smooth_l1_loss", "huber_loss", "cross_entropy"))),
        reduction=draw(st.sampled_from(("mean", "sum"))),
        optimizer=optimizer,
        # A closure zeroes all gradients, even those that the other optimizer is reducing, which is refused. Split, one
        # of two optimizers may have its gradients from one call in the first step, and from two in a later one.
        optimizers=1 if optimizer == "LBFGS" or "split" in parts else draw(st.sampled_from((1, 1, 1, 2))),
        passes=1 if optimizer == "LBFGS" else draw(st.sampled_from((1, 1, 2, 3))),
        clip=draw(st.booleans()),
        bucket_cap_mb=draw(st.sampled_from((None, 0.0001))),
        shared_memory=draw(st.booleans()),
        steps=draw(st.lists(STEPS, min_size=2, max_size=most_steps).map(tuple)),
    )
