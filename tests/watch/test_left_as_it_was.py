"""An explanation leaves nothing behind."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

import floatplan as fp
from floatplan.engine import cache, state, watched
from floatplan.engine.region import autocast


def hooks() -> tuple[int, ...]:
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_always_called")
    return tuple(len(getattr(module_hooks, name)) for name in names)


def everything(model: nn.Module) -> dict[str, Any]:
    """What must be as before; tensors by identity and version, too."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {name: (id(tensor), tensor._version) for name, tensor in tensors.items()},
        "values": {name: tensor.detach().clone().tolist() for name, tensor in tensors.items()},
        "grads": {name: id(parameter.grad) for name, parameter in model.named_parameters()},
        "training": [module.training for module in model.modules()],
        "hooks": (hooks(), [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]),
        "random": torch.get_rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
        "policies": (state.number_in_force(), dict(state._used), dict(state._thread.opened)),
        "watchers": dict(watched.watchers),
        "cache": (cache._local.copies, fp.cast_cache().copies),
        "modes": torch._C._len_torch_dispatch_stack(),
    }


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    model(torch.randn(3, 4)).sum().backward()
    model[3].register_forward_hook(lambda *_: None)
    model[1].eval()
    return model


@pytest.mark.parametrize("grad", [False, True])
def test_all_is_as_before(grad: bool) -> None:
    model, x = network().train(), torch.randn(3, 4)
    before = everything(model)
    explanation = fp.explain(model, x, grad=grad)
    assert {row.module_type for row in explanation.rows} == {"Linear", "BatchNorm1d", "Dropout"}
    assert everything(model) == before


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("as asked")


def test_all_is_as_before_where_the_model_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), Fails())
    x = torch.randn(3, 4)
    before = everything(model)
    with pytest.raises(ZeroDivisionError, match="as asked"):
        fp.explain(model, x)
    assert everything(model) == before


def test_an_operator_that_raises_is_forgotten() -> None:
    class Tries(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return x @ torch.ones(7, 7)
            except RuntimeError:
                return x.relu()

    (row,) = fp.explain(Tries(), torch.ones(2, 2)).rows[-1:]
    assert row.operator == "aten::relu"


def test_a_buffer_that_a_forward_replaces_is_put_back() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + 1
            return x * self.seen

    model = Counts()
    buffer = model.seen
    fp.explain(model, torch.ones(2))
    assert model.seen is buffer
    assert buffer.item() == 0


def test_a_graph_from_before_can_still_be_walked() -> None:
    model = nn.BatchNorm1d(4).eval()
    loss = model(torch.randn(3, 4)).sum()
    fp.explain(model.train(), torch.randn(3, 4))
    loss.backward()


def test_no_policy_is_remembered_that_would_confuse_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_used", {})
    model, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with fp.autocast("cpu", torch.bfloat16):
        out = checkpoint(model, x, use_reentrant=False)
    fp.explain(model, x, policy=fp.Policy.unified().with_ops(fp32=["aten::linear"]))
    out.float().sum().backward()
    assert x.grad is not None


def test_rules_of_ordinary_regions_know_nothing_of_a_watcher() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    fp.explain(model, x)
    region = autocast("cpu", torch.bfloat16)
    with region:
        assert type(state.policies_in_force()["cpu"]) is fp.Policy
        out = model(x)
    assert out.dtype is torch.bfloat16


def test_another_thread_runs_as_always_meanwhile() -> None:
    found: list[Any] = []

    def work() -> None:
        with fp.autocast("cpu", torch.bfloat16):
            found.append(
                (type(state.policies_in_force()["cpu"]), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            )

    class Spawns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return x + x

    explanation = fp.explain(Spawns(), torch.ones(2))
    assert [row.operator for row in explanation.rows] == ["aten::add.Tensor"]
    assert found == [(fp.Policy, torch.bfloat16)]


def test_one_explanation_inside_of_another_is_refused() -> None:
    class Explains(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            fp.explain(nn.Linear(2, 2), x)
            return x

    with pytest.raises(fp.FloatplanError, match="inside of another"):
        fp.explain(Explains(), torch.ones(2, 2))
    assert not watched.watchers


def test_the_numbers_are_those_of_a_real_run() -> None:
    torch.manual_seed(0)
    model = network().eval()
    seen: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda module, args, out: seen.append(out))
    x = torch.randn(3, 4)
    fp.explain(copy.deepcopy(model), x)
    with torch.no_grad(), fp.autocast("cpu", torch.bfloat16):
        model(x)
    handle.remove()
    assert torch.equal(*seen)


def test_compiled_modules_run_uncompiled() -> None:
    model = torch.compile(nn.Linear(4, 4), backend="eager")
    (row,) = fp.explain(model, torch.ones(2, 4)).rows
    assert (row.operator, row.ran_in, row.module) == ("aten::linear", "bfloat16", "_orig_mod")
