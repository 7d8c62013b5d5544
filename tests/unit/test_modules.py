"""A packed module equals the module: same outputs, weights still tied, nothing lost, the original unchanged."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

from spark_hvd.estimators.training.packing import PackedModule, pack, unpack
from spark_hvd.runner.outcome.payload import UnpicklableError


class Odd(nn.Module):
    """What modules may contain besides plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 4)
        self.tied.weight = self.first.weight
        self.second.weight = nn.Parameter(self.first.weight.detach().t())  # another view of one storage
        self.first.bias.requires_grad_(False)
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)
        self.marked = nn.Buffer(torch.zeros(2))
        self.table = torch.arange(1000.0)[10:12]
        self.complex = torch.ones(2, dtype=torch.complex64)
        self.half = torch.ones(2, dtype=torch.bfloat16)
        self.computed = self.first.weight * 2

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.tied(self.second(self.first(rows))) + self.hidden[0]  # type: ignore[no-any-return]


def there_and_back(module: nn.Module) -> nn.Module:
    return unpack(pickle.loads(pickle.dumps(pack(module))))  # type: ignore[no-any-return]


def test_all_that_a_module_holds_comes_back() -> None:
    torch.manual_seed(0)
    module, rows = Odd().eval(), torch.randn(5, 3)
    before = copy.deepcopy(module.state_dict())
    back = there_and_back(module)
    assert isinstance(back, Odd)
    assert torch.equal(back(rows), module(rows))
    assert not back.training
    assert [name for name, _ in back.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert not back.first.bias.requires_grad
    assert back.first.weight.requires_grad
    assert back.table.tolist() == [10.0, 11.0]
    assert back.complex.tolist() == [1 + 0j, 1 + 0j]
    assert back.half.dtype == torch.bfloat16
    assert "hidden" not in back.state_dict()
    assert back.hidden.tolist() == [0.0, 1.0, 2.0]
    assert isinstance(back.marked, nn.Buffer)
    assert back.computed.is_leaf
    assert back.image.weight.stride() == module.image.weight.stride()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_tied_weights_and_views_stay_tied() -> None:
    back = there_and_back(Odd())
    assert isinstance(back, Odd)
    assert back.tied.weight is back.first.weight
    with torch.no_grad():
        back.first.weight[1, 2] = 7.0
    assert back.second.weight[2, 1] == 7.0
    assert isinstance(back.second.weight, nn.Parameter)


def test_weights_are_plain_safetensors_under_their_names_and_not_in_the_pickle() -> None:
    module = nn.Sequential(nn.Linear(500, 400), nn.BatchNorm1d(400))
    packed = pack(module)
    weights = safetensors.torch.load(packed.weights)
    assert set(weights) == set(module.state_dict())
    assert torch.equal(weights["0.weight"], module[0].weight)
    assert len(packed.structure) < 10_000


def test_of_a_small_part_of_a_large_tensor_only_the_part_is_kept() -> None:
    module = nn.Module()
    module.part = torch.zeros(1_000_000)[:3]
    assert len(pack(module).weights) < 1000


def test_model_and_optimizer_packed_together_share_their_weights() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    back = unpack(pack({"model": model, "optimizer": optimizer}))
    assert back["optimizer"].param_groups[0]["params"][0] is back["model"].weight
    assert back["optimizer"].param_groups[0]["lr"] == 0.25
    assert back["optimizer"].state[back["model"].weight]["step"] == 1
    assert back["model"].weight.grad is None
    assert model.weight.grad is not None


def test_digest_tells_weights_apart_and_is_the_same_for_the_same() -> None:
    model = nn.Linear(2, 1)
    digest = pack(model).digest()
    assert pack(model).digest() == digest
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert pack(model).digest() != digest
    assert PackedModule(b"ab", b"c").digest() != PackedModule(b"a", b"bc").digest()


def test_torchscript() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.script(nn.Linear(2, 2).eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = there_and_back(script)
        nested = there_and_back(nn.Sequential(script))
    assert isinstance(back, torch.jit.ScriptModule)
    assert not back.training
    assert torch.equal(back(torch.ones(1, 2)), script(torch.ones(1, 2)))
    assert torch.equal(nested(torch.ones(1, 2)), script(torch.ones(1, 2)))


@pytest.mark.slow
def test_lightning_module() -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Net(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(2, 1)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.layer(rows)  # type: ignore[no-any-return]

    net = Net()
    assert torch.equal(there_and_back(net)(torch.ones(1, 2)), net(torch.ones(1, 2)))


def test_loss_modules_and_functions() -> None:
    loss = there_and_back(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
    assert loss.weight.tolist() == [1.0, 3.0]  # type: ignore[union-attr,operator]
    assert unpack(pack(nn.functional.mse_loss)) is nn.functional.mse_loss


def test_what_does_not_pickle_is_named() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    module[1][0].guard = threading.Lock()  # type: ignore[index,union-attr,operator]
    with pytest.raises(UnpicklableError, match=r"cannot pickle model: model\.1\.0\.guard is a _thread\.lock"):
        pack(module)
