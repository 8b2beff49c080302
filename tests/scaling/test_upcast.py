"""Parameters that share memory, made float32: they share it afterwards, in the same places."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import floatplan as fp


def model(dtype=torch.float16) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(4, 4, dtype=dtype), "b": nn.Linear(4, 4, dtype=dtype)})


def shared(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """Another tensor in the memory of ``weight``."""
    return {"all": weight, "transposed": weight.t(), "rows": weight[1:3], "strided": weight[:, ::2]}[kind]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["all", "transposed", "rows", "strided"])
@pytest.mark.parametrize("whole_first", [False, True])
def test_a_parameter_in_the_memory_of_another(whole_first, kind, dtype) -> None:
    one, other = ("a", "b") if whole_first else ("b", "a")
    net = model(dtype)
    net[other].weight = nn.Parameter(shared(kind, net[one].weight.data))
    before = {name: value.float() for name, value in net.state_dict().items()}
    names = fp.upcast_trainable(net)
    assert names == list(before)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with torch.no_grad():
        net[one].weight += torch.arange(16.0).view(4, 4)
    assert torch.equal(net[other].weight, shared(kind, net[one].weight))


def test_two_parameters_of_one_flat_memory() -> None:
    flat = torch.arange(20, dtype=torch.float16)
    net = nn.ParameterList([flat[2:8].view(2, 3), flat[8:8], flat[10:14]])
    fp.upcast_trainable(net)
    assert net[0].data_ptr() + 4 * 8 == net[2].data_ptr()
    assert [param.tolist() for param in net] == [[[2, 3, 4], [5, 6, 7]], [], [10, 11, 12, 13]]


def test_a_parameter_that_repeats_its_own_memory() -> None:
    net = nn.ParameterList([torch.ones(3, 1, dtype=torch.float16).expand(3, 4)])
    fp.upcast_trainable(net)
    assert net[0].stride() == (1, 0)
    with torch.no_grad():
        net[0][:, 0] = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(net[0][:, 3], torch.tensor([1.0, 2.0, 3.0]))


def test_no_more_memory_than_needed() -> None:
    net = nn.ParameterList([torch.ones(100, 4, dtype=torch.float16)[:, 1]])
    fp.upcast_trainable(net)
    assert net[0].untyped_storage().nbytes() == 400
