"""One training program, run by each of n ranks on its rows or by one process on all rows."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.oracle.cases import Case, Step

ROWS = 3
"""Rows of a rank per pass."""
DEVICE = os.environ.get("SPARK_HVD_TEST_DEVICE", "cpu")
"""The device of the models; ranks share the GPU if there is one."""


class Net(nn.Module):
    """An embedding, a convolution, a norm, two linear layers, a branch, a parameter of no dimension and an empty one.

    Parts: "tied" linear layers, "sparse" gradients of the embedding, "frozen norm" or "sync norm", "checkpoint" of
    activations.
    """

    def __init__(self, case: Case, norm: type[nn.Module]) -> None:
        super().__init__()
        self.parts = case.parts
        self.embedding = nn.Embedding(7, 4, sparse="sparse" in case.parts)
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm: nn.Module = norm(4) if "sync norm" in case.parts else nn.BatchNorm2d(4)
        self.first, self.second, self.branch = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        if "tied" in case.parts:
            self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        if case.dtype == "mixed":
            self.double()
            self.second.float()
            if "tied" in case.parts:
                self.first.float()
        else:
            self.to(getattr(torch, case.dtype))

    def forward(self, words: torch.Tensor, pixels: torch.Tensor, branches: torch.Tensor | None) -> torch.Tensor:
        """Return scores (rows, 3) of words (rows, 4) and pixels (rows, 2, 3, 3); in branches (rows, 1), 1 means yes."""
        seen = self.conv(pixels.to(self.conv.weight.dtype))
        if "sync norm" in self.parts:
            seen = self.norm(seen)
        elif "frozen norm" in self.parts:
            seen = self.norm.eval()(seen)
        hidden = self.embedding(words).mean(1) + seen.mean((2, 3))
        hidden = (checkpoint(self._linear, hidden, use_reentrant=False) if "checkpoint" in self.parts
                  else self._linear(hidden))  # fmt: skip
        if branches is not None:
            hidden = hidden + self.branch(hidden.to(self.branch.weight.dtype)).sin() * branches.to(hidden.dtype)
        return self.last(hidden.to(self.last.weight.dtype)) * self.scale + self.empty.sum()

    def _linear(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden.to(self.first.weight.dtype)).tanh()
        return self.second(hidden.to(self.second.weight.dtype)).tanh()


class Training:
    """One process's part in a case.

    Args:
        case: The training.
        rank: This rank's number, None for the process that has all rows.
        distribute: Makes an optimizer distributed.
        norm: The class of a synchronized norm.
        order: The order of one process's rows, which changes only rounding. By default that of the ranks.
    """

    def __init__(
        self, case: Case, rank: int | None, distribute: Any, norm: type[nn.Module], order: torch.Tensor | None = None
    ) -> None:
        seeds = torch.random if DEVICE != "cpu" else torch.default_generator  # torch.manual_seed takes 5 ms
        seeds.manual_seed(case.seed)
        torch.backends.cudnn.allow_tf32 = False
        self.case, self.rank = case, rank
        mine = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
        self.mine: slice | torch.Tensor = mine if order is None else order
        self.model = Net(case, norm).to(DEVICE)
        self.averaged = torch.optim.swa_utils.AveragedModel(self.model) if "ema" in case.parts else None
        params = list(self.model.parameters())
        self.added = [self.model.branch.weight, self.model.branch.bias]
        held_back = {id(param) for param in self.added}
        rest = [param for param in params if id(param) not in held_back]
        shares = [rest[number :: case.optimizers] for number in range(case.optimizers)]
        self.optimizers = [distribute(_optimizer(case.optimizer, share)) for share in shares]
        self.losses: list[float] = []

    def run(self) -> dict[str, Any]:
        """Train; return the losses of all passes, weights, buffers and optimizer states."""
        for number, step in enumerate(self.case.steps):
            if DEVICE != "cpu" and number % 2:  # gradients, if there are some, move too
                self.model.cpu().to(DEVICE)
            self._step(number, step)
        weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        if self.averaged is not None:
            weights |= {f"average of {name}": each for name, each in self.averaged.module.state_dict().items()}
        states = [
            {f"{place}.{key}": value for place, state in optimizer.state_dict()["state"].items()
             for key, value in state.items() if isinstance(value, torch.Tensor)}
            for optimizer in self.optimizers
        ]  # fmt: skip
        return {"losses": self.losses, "weights": _on_cpu(weights), "states": [_on_cpu(state) for state in states]}

    def _step(self, number: int, step: Step) -> None:
        for action in step.before:
            self._do(action)
        self._zero(step.zeroing)
        for action in step.after:
            self._do(action)
        if self.case.optimizer == "LBFGS":
            for each in self.optimizers:
                each.step(lambda: self._closure(number, step))
            return
        self._backward(number, step)
        if step.end == "skip":
            self._synchronize()
            self._zero(step.zeroing)
            return
        if step.end == "sam":
            self._second_pass(number, step)
        if self.case.clip:
            self._synchronize()
            for param in self._graded():
                if not param.grad.is_sparse:  # type: ignore[union-attr]
                    param.grad.clamp_(-0.05, 0.05)  # type: ignore[union-attr]
        for each in self.optimizers:
            each.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)

    def _graded(self) -> list[torch.nn.Parameter]:
        """Parameters of no optimizer have gradients of their rank's rows alone."""
        params = (param for each in self.optimizers for group in each.param_groups for param in group["params"])
        return [param for param in params if param.grad is not None]

    def _synchronize(self) -> None:
        for each in self.optimizers:
            getattr(each, "synchronize", lambda: None)()

    def _second_pass(self, number: int, step: Step) -> None:
        self._synchronize()
        graded = self._graded()
        start = [param.detach().clone() for param in graded]
        with torch.no_grad():
            for param in graded:
                param.add_(param.grad.to_dense() if param.grad.is_sparse else param.grad, alpha=0.05)  # type: ignore[union-attr,arg-type]
        self._zero(step.zeroing)
        self._backward(number + 100, step)
        with torch.no_grad():
            for param, value in zip(graded, start, strict=True):
                param.copy_(value)

    def _closure(self, number: int, step: Step) -> torch.Tensor:
        self._zero("optimizer to None")
        return self._backward(number, step)

    def _backward(self, number: int, step: Step) -> torch.Tensor:
        loss = torch.zeros((), device=DEVICE)
        for turn in range(self.case.passes):
            if turn:
                for action in step.between_passes:
                    self._do(action)
            loss = self._loss(*self._rows(number, turn), self._branches(step.branch))
            self.losses.append(loss.item())
            if "split" in self.case.parts:
                trained = [param for param in self.model.parameters() if param.requires_grad]
                loss.backward(inputs=trained[::2], retain_graph=True)
                loss.backward(inputs=trained[1::2])
            else:
                loss.backward()
        return loss

    def _rows(self, number: int, turn: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.case.seed + 1000 * number + turn)
        count = self.case.ranks * ROWS
        words = torch.randint(0, 7, (count, 4), generator=generator)
        pixels = torch.randn(count, 2, 3, 3, generator=generator)
        labels = torch.randn(count, 3, generator=generator)
        return words[self.mine].to(DEVICE), pixels[self.mine].to(DEVICE), labels[self.mine].to(DEVICE)

    def _branches(self, who: str) -> torch.Tensor | None:
        if who == "none" or (who == "some" and self.rank is not None and self.rank % 2 == 0):
            return None
        ranks = torch.arange(self.case.ranks * ROWS).div(ROWS, rounding_mode="floor")[self.mine, None]
        if self.rank is not None:
            ranks = ranks[:ROWS] * 0 + 1
        return (ranks % 2).double() if who == "some" else torch.ones(len(ranks), 1, dtype=torch.float64)

    def _loss(
        self, words: torch.Tensor, pixels: torch.Tensor, labels: torch.Tensor, branches: torch.Tensor | None
    ) -> torch.Tensor:
        scores = self.model(words, pixels, branches)
        targets = labels.argmax(1) if self.case.loss == "cross_entropy" else labels.to(scores.dtype)
        loss: torch.Tensor = getattr(functional, self.case.loss)(scores, targets, reduction=self.case.reduction)
        return loss

    def _zero(self, way: str) -> None:
        to_none = way.endswith("None")
        if way.startswith("model"):
            self.model.zero_grad(set_to_none=to_none)
        else:
            for each in self.optimizers:
                each.zero_grad(set_to_none=to_none)

    def _do(self, action: str) -> None:
        model = self.model
        if action == "cast there and back":
            dtypes = {id(param): param.dtype for param in model.parameters()}
            model.float()  # in a lower precision, a difference of one bit would grow
            model.double()
            for param in model.parameters():
                _cast(param, dtypes[id(param)])
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(model.conv.weight.dtype)
        elif action == "cast for good":
            model.to(torch.float32 if model.conv.weight.dtype == torch.float64 else torch.float64)
        elif action in ("channels_last", "contiguous"):
            model.to(memory_format=torch.channels_last if action == "channels_last" else torch.contiguous_format)
        elif action == "re-point the parameter":
            for param in model.parameters():
                param.data = param.data.clone()
        elif action in ("freeze", "unfreeze"):
            model.first.requires_grad_(action == "unfreeze")
        elif action == "add_param_group":
            if self.added:
                self.optimizers[0].add_param_group({"params": self.added})
                self.added = []
        elif action == "load_state_dict":
            for each in self.optimizers:
                each.load_state_dict(copy.deepcopy(each.state_dict()))
        elif action == "grads swapped":
            # No parameter gets a gradient of all ranks' rows for its own, nor one that another optimizer reduces.
            for each in self.optimizers:
                params = [param for group in each.param_groups for param in group["params"]]
                # Only some ranks have a gradient of the branch.
                shared = [param for param in params if param not in set(model.branch.parameters())]
                _do_to_grads(action, [param for param in shared if param.grad is not None])
        else:
            _do_to_grads(action, [param for param in model.parameters() if param.grad is not None])


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _cast(param: torch.nn.Parameter, dtype: torch.dtype) -> None:
    param.data = param.data.to(dtype)
    if param.grad is not None:
        param.grad.data = param.grad.data.to(dtype)


def _do_to_grads(action: str, params: list[torch.nn.Parameter]) -> None:
    if action == "grads swapped":
        same = [param for param in params if param.shape == (4,) and param.dtype == params[0].dtype]
        if len(same) > 1:
            grads = [param.grad for param in same]
            for param, grad in zip(same, grads[1:] + grads[:1], strict=True):
                param.grad = grad
        return
    for param in params:
        grad = param.grad
        assert grad is not None
        if action == "grad = None":
            param.grad = None
        elif action == "grad = clone":
            param.grad = grad.clone()
        elif action == "grad = detach":
            param.grad = grad.detach()
        elif grad.is_sparse:
            continue
        elif action == "grad.data = clone":
            grad.data = grad.data.clone()
        elif action == "grad.set_":
            grad.set_(grad.clone())  # type: ignore[call-overload]
        elif grad.dim() == 2:
            grad.data = grad.data.t().contiguous().t()


def _optimizer(name: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01} if name == "SGD" else {}
    if name == "LBFGS":
        options = {"max_iter": 4, "line_search_fn": "strong_wolfe", "tolerance_change": 1e-3}
    elif name not in ("SGD", "ASGD", "Rprop", "Adafactor"):
        options = {"eps": 1e-4}  # then a gradient that is zero but for rounding changes nothing
    made: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=0.01, **options)
    return made
