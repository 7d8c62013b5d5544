"""Adagrad with one number of state per row, for embedding tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad whose sum of squares is a mean over each row: for `dim` columns it needs 1/dim of Adagrad's memory.

    Gupta et al. (arXiv 1404.2405) and the tables of DLRM use it. It accepts sparse and dense gradients.

    Args:
        params: Parameters with at least two dimensions, or groups of them.
        lr: Learning rate.
        eps: Added to the root of the sum.
        initial_accumulator_value: Initial value of the sums.

    Raises:
        ValueError: A number is negative.
    """

    __module__: str = "spark_hvd.torch"

    def __init__(
        self, params: Any, lr: float = 0.01, eps: float = 1e-10, initial_accumulator_value: float = 0.0
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("initial_accumulator_value", initial_accumulator_value)):
            if not value >= 0:
                raise ValueError(f"{name}={value}: must be 0 or more")
        super().__init__(params, {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See torch.optim.Optimizer.step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = param.grad, self.state[param]
        assert gradient is not None
        if not state:
            state["sum"] = torch.full(
                (len(param),), group["initial_accumulator_value"], dtype=param.dtype, device=param.device
            )
        if gradient.is_sparse:
            gradient = gradient.coalesce()  # a row that was looked up several times must be squared once
            rows, values = gradient.indices()[0], gradient.values()
            sums = state["sum"].index_select(0, rows).add_(values.square().flatten(1).mean(1))
            state["sum"].index_copy_(0, rows, sums)
            # Not index_add_, which on the CPU processes the rows one by one.
            step = torch.sparse_coo_tensor(
                gradient.indices(), _scaled(values, sums, group["eps"]), param.shape, check_invariants=False
            )
            param.add_(step, alpha=-group["lr"])
        else:
            state["sum"] += gradient.square().flatten(1).mean(1)
            param.sub_(_scaled(gradient, state["sum"], group["eps"]), alpha=group["lr"])


def _scaled(rows: torch.Tensor, sums: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by the root of its sum."""
    return rows / sums.sqrt().add_(eps).view(-1, *[1] * (rows.dim() - 1))
