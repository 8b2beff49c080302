"""What a skipped step leaves in a model: running statistics and named buffers as they were before."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import floatplan as fp
from floatplan.errors import StepError
from floatplan.step import Statistics

NAN_WITH_PAYLOAD = 0x7FC00ABC


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer, in integers of its own width, so that NaN can be compared."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: buffer.detach().clone().view(width[buffer.element_size()])
        for name, buffer in model.named_buffers()
    }


def same(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = bits(model)
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in before)


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


# --- One inf among the activations ----------------------------------------------------------------------


def train(model: nn.Module, scaler: torch.amp.GradScaler, statistics: Statistics | None) -> list[float]:
    """Four good steps around one with an inf in its input; the scale after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    scales = []
    for number in range(5):
        x = torch.randn(16, 4, generator=generator)
        if number == 2:
            x[3, 1] = math.inf
        optimizer.zero_grad()
        if statistics is not None:
            statistics.take()
        before = scaler.get_scale()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if statistics is not None and scales[-1] < before:
            statistics.restore()
    return scales


@pytest.mark.trouble("T47")
def test_torch_amp_evaluates_to_nan_for_ever() -> None:
    model = small_net()
    assert train(model, torch.amp.GradScaler("cpu"), None)[-1] == 2.0**15
    assert not model[1].running_mean.isfinite().all()
    assert model[1].running_var.isnan().any()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.eval()(torch.ones(1, 4)).isnan().any()


@pytest.mark.trouble("T47")
def test_a_skipped_step_leaves_nothing_in_the_statistics() -> None:
    model, unspoiled = small_net(), small_net()
    train(model, fp.GradScaler("cpu"), Statistics(model))
    assert model[1].num_batches_tracked.item() == 4
    assert model.eval()(torch.ones(1, 4)).isfinite().all()

    # The same as a run that never saw the bad batch.
    optimizer = torch.optim.SGD(unspoiled.parameters(), lr=0.01)
    scaler, generator = fp.GradScaler("cpu"), torch.Generator().manual_seed(1)
    for number in range(5):
        x = torch.randn(16, 4, generator=generator)
        if number == 2:
            scaler.update(2.0**15)
            continue
        optimizer.zero_grad()
        scaler.scale(unspoiled(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    unspoiled.eval()
    assert same(model, bits(unspoiled))
    assert all(map(torch.equal, model.parameters(), unspoiled.parameters()))


# --- Every norm -----------------------------------------------------------------------------------------

IMAGE = (2, 4, 6, 6)


class HomeMadeNorm(nn.Module):
    """A norm that shares no class with torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running_mean.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
        self.running_var.mul_(0.9).add_(x.var((0, 2, 3)), alpha=0.1)
        return x - self.running_mean[:, None, None]


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "without weights": lambda: nn.BatchNorm2d(4, affine=False),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "float64": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4).double()),
    "bfloat16": lambda: nn.BatchNorm2d(4).bfloat16(),
    "instance": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "not tracking": lambda: nn.Sequential(nn.InstanceNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)),
    "home-made": HomeMadeNorm,
    "shared": lambda: nn.Sequential(*[nn.BatchNorm2d(4)] * 2, nn.BatchNorm2d(4)),
    "in a compiled model": lambda: torch.compile(
        nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4)), backend="aot_eager"
    ),
    "none": lambda: nn.Conv2d(4, 4, 1),
}


def forward(model: nn.Module, x: torch.Tensor) -> None:
    for module in model if isinstance(model, nn.Sequential) else [model]:
        dtypes = {buffer.dtype for buffer in module.buffers() if buffer.is_floating_point()}
        x = module(x.to(dtypes.pop()) if dtypes else x)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("where", [None, torch.ones(1)], ids=["at once", "by a flag"])
def test_every_norm_is_restored_bit_by_bit(name: str, where: torch.Tensor | None) -> None:
    model = NORMS[name]()
    statistics, objects = Statistics([model]), list(model.buffers())
    forward(model, torch.randn(IMAGE))
    for buffer in model.buffers():
        if buffer.dtype is torch.float32:
            buffer.view(torch.int32)[0] = NAN_WITH_PAYLOAD
    before = bits(model)
    statistics.take()
    for spoiled in (math.inf, math.nan, 1.0):
        forward(model, torch.full(IMAGE, spoiled))
        assert not before or not same(model, before)
        statistics.restore(where)
        assert same(model, before)
    assert all(now is then for now, then in zip(model.buffers(), objects, strict=True))


def test_a_flag_of_zero_changes_nothing() -> None:
    model = small_net()
    statistics = Statistics(model, ["1.*"])
    statistics.take()
    model(torch.randn(8, 4))
    after = bits(model)
    statistics.restore(torch.zeros(()))
    assert same(model, after)


def test_norms_in_eval_mode_are_not_touched() -> None:
    model = small_net()
    statistics = Statistics(model)
    model.eval()
    statistics.take()
    model[1].running_mean.fill_(3.0)
    statistics.restore()
    assert (model[1].running_mean == 3.0).all()
    model.train()
    statistics.take()
    model[1].running_mean.fill_(4.0)
    statistics.restore()
    assert (model[1].running_mean == 3.0).all()


def test_a_norm_that_is_not_made_yet_starts_anew() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 1))
    statistics = Statistics(model)
    statistics.take()
    model(torch.full((3, 4), math.inf))
    statistics.restore()
    assert same(model, bits(nn.Sequential(nn.BatchNorm1d(4))))
    statistics.take()
    model(torch.ones(3, 4))
    statistics.restore()
    assert model[0].num_batches_tracked.item() == 0


# --- A model that changes between two steps, or within one ----------------------------------------------


def state_assigned(model: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def data_set(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.clone()


def data_of_another_shape(model: nn.Module) -> None:
    model[1].running_mean.data = torch.zeros(1, 8)
    model[1].running_mean.data = torch.zeros(8)


@pytest.mark.parametrize("change", [state_assigned, data_set, data_of_another_shape, nn.Module.double])
def test_buffers_that_were_replaced(change: Callable[[nn.Module], object]) -> None:
    model = small_net()
    statistics = Statistics(model)
    statistics.take()
    change(model)
    before = bits(model)
    # Taken before the change, restored after it.
    model[1].running_mean.fill_(math.inf)
    statistics.restore()
    assert same(model, before)
    # And the next step.
    statistics.take()
    model[1].running_var.fill_(math.nan)
    model[1].num_batches_tracked.add_(1)
    statistics.restore()
    assert same(model, before)


def test_statistics_that_are_given_up_between_steps() -> None:
    model = small_net()
    statistics = Statistics(model)
    statistics.take()
    model[1].running_mean = model[1].running_var = None
    statistics.take()
    model[1].num_batches_tracked.add_(1)
    statistics.restore()
    assert model[1].running_mean is None
    assert model[1].num_batches_tracked.item() == 0


def test_a_tensor_that_gets_another_device_where_it_is() -> None:
    model = small_net()
    statistics = Statistics(model)
    statistics.take()
    torch.utils.swap_tensors(model[1].running_mean, torch.zeros(8, device="meta"))
    statistics.take()
    torch.utils.swap_tensors(model[1].running_mean, torch.ones(8))
    model[1].running_var.fill_(2.0)
    statistics.take()
    model[1].running_mean.fill_(math.inf)
    statistics.restore()
    assert (model[1].running_mean == 1.0).all()
    assert (model[1].running_var == 2.0).all()


def test_the_graph_of_another_loss_can_still_run_backward() -> None:
    model = small_net()
    statistics = Statistics(model)
    statistics.take()
    loss = model(torch.randn(8, 4)).sum()
    statistics.restore()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_inside_a_region_and_inference_mode_precision_is_kept() -> None:
    model = small_net()
    model[1].running_mean.fill_(1 / 3)
    before = bits(model)
    statistics = Statistics(model)
    with fp.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        statistics.take()
    model[1].running_mean.fill_(0.0)
    with fp.autocast("cpu", dtype=torch.bfloat16):
        statistics.restore()
    assert same(model, before)


# --- Buffers that the user names ------------------------------------------------------------------------


class Codebook(nn.Module):
    """Buffers of every kind that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.arange(6.0).reshape(2, 3), persistent=False)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.long))
        self.register_buffer("updates", torch.tensor(0))
        self.register_buffer("ring", torch.zeros(2))
        self.register_buffer("first", None)
        self.register_buffer("last", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.add_(x)
        self.counts += 1
        self.updates = self.updates + 1
        self.ring = torch.cat([self.ring, x.reshape(1)])
        self.first = x
        self.last = None
        return x


@pytest.mark.parametrize("globs", [["**"], ["*.*"], ["1.[cu]*", "1.ring", "1.first", "1.last", "1.last"]])
def test_named_buffers(globs: list[str]) -> None:
    model = nn.Sequential(nn.Identity(), Codebook()).eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    statistics = Statistics([small_net(), model], globs)
    for _ in range(2):
        statistics.take()
        model(torch.tensor(math.inf))
        model[1].ring.fill_(math.nan)
        statistics.restore()
        now = dict(model.named_buffers())
        assert now.keys() == before.keys()
        assert all(torch.equal(now[name], before[name]) for name in before)
        assert model[1].first is None


def test_a_backward_that_reads_a_named_buffer_is_refused_by_torch() -> None:
    model, weight = Codebook(), torch.ones(2, 3, requires_grad=True)
    statistics = Statistics(model, ["codes"])
    statistics.take()
    model(torch.tensor(1.0))
    loss = (weight * model.codes).sum()
    statistics.restore()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("globs", "said"),
    [
        (["1.cods"], r"buffers: '1.cods' matches no buffer of the model; did you mean '1.codes'"),
        (["codes"], r"did you mean '\*\*.codes'"),
        (["xyz"], r"its buffers: '1.codes', '1.counts'"),
        ("1.codes", r"must be a list of names, got the string"),
    ],
)
def test_names_that_match_nothing(globs: list[str], said: str) -> None:
    with pytest.raises(StepError, match=said):
        Statistics(nn.Sequential(nn.Identity(), Codebook()), globs)


# --- The order of calls, and the cost -------------------------------------------------------------------


def test_restore_needs_something_taken() -> None:
    statistics = Statistics(small_net())
    with pytest.raises(StepError, match=r"call take\(\) before"):
        statistics.restore()
    statistics.take()
    statistics.restore()
    statistics.restore()
    statistics.drop()
    with pytest.raises(StepError, match=r"call take\(\) before"):
        statistics.restore()


def test_length_counts_the_buffers_covered() -> None:
    assert len(Statistics(small_net())) == 3
    assert len(Statistics(nn.Linear(2, 2))) == 0
    assert len(Statistics(Codebook(), ["c*"])) == 2


def test_taking_asks_no_operator_per_layer() -> None:
    model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(20)])
    statistics = Statistics(model)
    statistics.take()
    with torch.profiler.profile() as profile:
        statistics.take()
    calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("aten::")}
    assert calls["aten::cat"] <= 2  # stack calls cat
    assert not {"aten::clone", "aten::copy_"} & calls.keys()
    model.eval()
    with torch.profiler.profile() as profile:
        statistics.take()
    assert not [event for event in profile.key_averages() if event.key.startswith("aten::")]


@pytest.mark.gpu
def test_on_a_gpu_without_a_wait() -> None:
    model = small_net().cuda()
    statistics = Statistics(model)
    x = torch.full((8, 4), math.inf, device="cuda")
    before, flag = bits(model), torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        statistics.take()
        model(x)
        statistics.restore(flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(model, before)
