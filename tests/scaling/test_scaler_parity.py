"""Names, signatures, attributes and state: ours and torch's can stand for each other."""

from __future__ import annotations

import copy
import inspect
import pickle
import types

import pytest
import torch
from torch.amp import GradScaler as TorchScaler

import floatplan as fp
from floatplan.amp.grad_scaler import GradScaler as AmpScaler
from floatplan.amp.grad_scaler import OptState
from floatplan.cpu.amp.grad_scaler import GradScaler as CpuScaler
from floatplan.cuda.amp.grad_scaler import GradScaler as CudaScaler
from floatplan.errors import PrecisionWarning

METHODS = sorted(n for n, v in vars(TorchScaler).items() if isinstance(v, types.FunctionType))

NEW = [
    ("min_scale", None),
    ("max_scale", None),
    ("hysteresis", 1),
    ("regrowth_interval", None),
    ("max_consecutive_skips", 50),
    ("on_skips", "warn"),
    ("check_losses", True),
]


def one_step(scaler: torch.amp.GradScaler, coefficient: float = 1.0) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale((param * coefficient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return param


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_our_own_with_the_signature_of_torch(name: str) -> None:
    assert getattr(fp.GradScaler, name) is not getattr(TorchScaler, name)
    ours = inspect.signature(getattr(fp.GradScaler, name)).parameters
    theirs = inspect.signature(getattr(TorchScaler, name)).parameters
    further = NEW if name == "__init__" else []
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        *((p.name, p.kind, p.default) for p in theirs.values()),
        *((name, inspect.Parameter.KEYWORD_ONLY, default) for name, default in further),
    ]


@pytest.mark.parametrize(("ours", "device"), [(CudaScaler, "cuda"), (CpuScaler, "cpu")])
def test_older_classes(ours: type[fp.GradScaler], device: str) -> None:
    older = getattr(torch, device).amp.GradScaler
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(older).parameters)
    scaler = ours(8.0, 3.0, 0.25, 7, False)
    assert isinstance(scaler, fp.GradScaler)
    assert (scaler._device, scaler.is_enabled()) == (device, False)
    assert (scaler._init_scale, scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval) == (
        8.0, 3.0, 0.25, 7,
    )  # fmt: skip


def test_older_spelling_works_without_a_warning() -> None:
    scaler = CpuScaler(init_scale=8.0)
    assert torch.equal(one_step(scaler), torch.full((3,), -1.0))


def test_one_class_under_every_name() -> None:
    assert AmpScaler is fp.GradScaler
    assert issubclass(fp.GradScaler, TorchScaler)
    assert OptState is torch.amp.grad_scaler.OptState


@pytest.mark.parametrize("enabled", [True, False])
def test_attributes_of_torch_are_there_with_the_same_values(enabled: bool) -> None:
    ours, theirs = fp.GradScaler("cpu", enabled=enabled), TorchScaler("cpu", enabled=enabled)
    missing = vars(theirs).keys() - vars(ours).keys()
    assert not missing
    assert {name: vars(ours)[name] for name in vars(theirs)} == vars(theirs)


@pytest.mark.trouble("T76")
@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_no_cuda_says_so() -> None:
    with pytest.warns(PrecisionWarning, match="CUDA is not available") as caught:
        scaler = fp.GradScaler()
    assert caught[0].filename == __file__
    assert not scaler.is_enabled()


def test_disabled_does_nothing() -> None:
    scaler = fp.GradScaler("cpu", enabled=False)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    loss = param.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    result = scaler.step(optimizer, closure=lambda: 5.0)
    scaler.update()
    scaler.load_state_dict({})
    assert scaler.state_dict() == {}
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.get_growth_factor()) == (1.0, 0, 2.0)
    assert result
    assert (result.reason, result.scale, result.value) == ("scaling disabled", 1.0, 5.0)
    assert (result.next_scale, result.grad_norm, result.culprit, result.skips_in_a_row) == (
        1.0,
        None,
        None,
        0,
    )
    assert param.item() == -1.0


def torchs_part(state: dict[str, object]) -> dict[str, object]:
    return {key: state[key] for key in TorchScaler("cpu").state_dict()}


@pytest.mark.trouble("T45")
def test_state_goes_both_ways() -> None:
    for first, second in ((fp.GradScaler, TorchScaler), (TorchScaler, fp.GradScaler)):
        source = first("cpu", 1024.0, 3.0, 0.25, 5)
        one_step(source)
        one_step(source, float("inf"))
        one_step(source)
        state = source.state_dict()
        assert torchs_part(state) == {
            "scale": 256.0,
            "growth_factor": 3.0,
            "backoff_factor": 0.25,
            "growth_interval": 5,
            "_growth_tracker": 1,
        }
        fresh, used = second("cpu"), second("cpu")
        one_step(used)
        for target in (fresh, used):
            target.load_state_dict(state)
            assert torchs_part(target.state_dict()) == torchs_part(state)
            one_step(target)
            assert target._get_growth_tracker() == 2


@pytest.mark.parametrize("kind", [fp.GradScaler, CpuScaler])
def test_pickle_and_copy(kind: type[fp.GradScaler]) -> None:
    scaler = kind(init_scale=512.0) if kind is CpuScaler else kind("cpu", init_scale=512.0)
    one_step(scaler, float("inf"))
    one_step(scaler)
    for again in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler), copy.copy(scaler)):
        assert type(again) is kind
        assert again.state_dict() == scaler.state_dict()
        assert again._scale is None
        one_step(again)
        assert again._get_growth_tracker() == 2
    assert scaler._get_growth_tracker() == 1


def test_pickle_in_mid_iteration_is_refused() -> None:
    scaler = fp.GradScaler("cpu")
    param = torch.nn.Parameter(torch.zeros(1))
    scaler.scale(param.sum()).backward()
    scaler.unscale_(torch.optim.SGD([param], lr=1.0))
    with pytest.raises(AssertionError, match=r"Call update\(\) first"):
        pickle.dumps(scaler)


def test_private_names_that_others_read() -> None:
    scaler = fp.GradScaler("cpu", init_scale=4.0)
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert scaler._get_scale_async() is None
    assert scaler._per_optimizer_states[0] == {"stage": OptState.READY, "found_inf_per_device": {}}
    scaler._per_optimizer_states.clear()
    scaler.scale(param.sum()).backward()
    scale, tracker = scaler._check_scale_growth_tracker("test")
    assert scale is scaler._scale is scaler._get_scale_async()
    assert (scale.dtype, scale.shape, scale.item()) == (torch.float32, (), 4.0)
    assert tracker is scaler._growth_tracker
    assert (tracker.dtype, tracker.shape, tracker.item()) == (torch.int32, (), 0)
    cpu = torch.device("cpu")
    assert scaler._check_inf_per_device(optimizer) == {cpu: torch.tensor(0.0)}
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    assert torch.equal(param.grad, torch.full((2,), 4.0))
    scaler.unscale_(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    assert scaler._found_inf_per_device(optimizer) == {cpu: torch.tensor(0.0)}
    scaler.step(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
    scaler.update()
    assert len(scaler._per_optimizer_states) == 0
    with pytest.raises(AssertionError, match="_scale"):
        scaler._lazy_init_scale_growth_tracker(cpu)


def test_setters() -> None:
    scaler = fp.GradScaler("cpu")
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(3)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
        1.0,
        0.25,
        3,
    )
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="growth_factor must be above 0"):
            scaler.set_growth_factor(bad)
        with pytest.raises(ValueError, match="backoff_factor must be above 0"):
            scaler.set_backoff_factor(bad)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (1.0, 0.25)


def test_scale_keeps_the_structure() -> None:
    Pair = __import__("collections").namedtuple("Pair", "a b")
    scaler = fp.GradScaler("cpu", init_scale=8.0)
    half = torch.ones(2, dtype=torch.float16)
    nested = scaler.scale([half, (half, Pair(half, [half]))])
    assert isinstance(nested, list)
    assert isinstance(nested[1], tuple)
    assert isinstance(nested[1][1], Pair)
    assert torch.equal(nested[1][1].b[0], half * 8)
    assert nested[0].dtype is torch.float16
    assert scaler.scale(half.sum()).dtype is torch.float32
    lazy = scaler.scale(iter([half, half]))
    assert [x[0].item() for x in lazy] == [8.0, 8.0]
    for bad in ("loss", {"loss": half}, 3.0, [half, None]):
        with pytest.raises(ValueError, match="a tensor or an iterable of tensors"):
            scaler.scale(bad)
