"""The public surface: names, import paths, signatures."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

import floatplan as fp
import floatplan.amp
import floatplan.cpu.amp
import floatplan.cuda.amp


def test_public_names() -> None:
    assert fp.__all__ == [
        "Amp",
        "CheckpointError",
        "Diagnosis",
        "Explanation",
        "FloatplanError",
        "FloatplanWarning",
        "GradScaler",
        "Plan",
        "Policy",
        "PrecisionWarning",
        "RecordingError",
        "Settings",
        "StepResult",
        "Task",
        "__version__",
        "autocast",
        "cast_cache",
        "current_precision",
        "custom_bwd",
        "custom_fwd",
        "diagnose",
        "downcast_frozen",
        "explain",
        "full_precision",
        "load",
        "record",
        "save",
        "tune_host",
        "upcast_trainable",
    ]
    for name in fp.__all__:
        assert getattr(fp, name) is not None
        assert name in dir(fp)
    with pytest.raises(AttributeError, match="no attribute 'autocats'"):
        fp.autocats  # noqa: B018


def test_a_training_needs_torch_alone() -> None:
    script = (
        "import sys, torch, floatplan as fp\n"
        "model = torch.nn.Linear(2, 2)\n"
        "amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), 'bf16')\n"
        "others = {'rich', 'typer', 'plotly', 'safetensors', 'sklearn', 'tomli'}\n"
        "assert not others & set(sys.modules), others & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], timeout=120, check=True)


def test_import_needs_no_torch() -> None:
    script = (
        "import sys, floatplan; assert 'torch' not in sys.modules; "
        "floatplan.autocast; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], timeout=120, check=True)


@pytest.mark.parametrize(
    "path",
    [
        f"{where}{module}"
        for where in ("amp", "cuda.amp", "cpu.amp")
        for module in ("", ".autocast_mode", ".grad_scaler")
    ],
)
def test_import_paths_mirror_torchs(path: str) -> None:
    ours = importlib.import_module(f"floatplan.{path}")
    theirs = importlib.import_module(f"torch.{path}")
    left_out = {"amp_definitely_not_available", "autocast_decorator"}
    # torch.cpu.amp has no __all__.
    names = set(getattr(theirs, "__all__", ["GradScaler", "autocast"])) - left_out
    assert names <= set(ours.__all__)
    assert all(hasattr(ours, name) for name in ours.__all__)


def test_namespaces_need_no_import_of_their_own() -> None:
    script = (
        "import floatplan as fp; fp.amp.autocast_mode.autocast; fp.amp.grad_scaler.GradScaler; "
        "fp.cuda.amp.autocast_mode; fp.cpu.amp.GradScaler"
    )
    subprocess.run([sys.executable, "-c", script], timeout=120, check=True)


OURS = ("policy", "strict", "respect_upcast")


def parameters(function: object) -> list[tuple[str, object]]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return [(p.name, p.default) for p in signature.parameters.values() if p.name not in ("self", *OURS)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (fp.autocast.__init__, torch.amp.autocast.__init__),
        (fp.custom_fwd, torch.amp.custom_fwd),
        (fp.custom_bwd, torch.amp.custom_bwd),
        (floatplan.cuda.amp.autocast.__init__, torch.cuda.amp.autocast.__init__),
        (floatplan.cpu.amp.autocast.__init__, torch.cpu.amp.autocast.__init__),
        (floatplan.cuda.amp.GradScaler.__init__, torch.cuda.amp.GradScaler.__init__),
        (floatplan.cpu.amp.GradScaler.__init__, torch.cpu.amp.GradScaler.__init__),
        (floatplan.cuda.amp.custom_fwd, torch.cuda.amp.custom_fwd),
        (floatplan.cuda.amp.custom_bwd, torch.cuda.amp.custom_bwd),
    ],
)
def test_signatures_are_torchs(ours: object, theirs: object) -> None:
    assert parameters(ours) == parameters(theirs)


def test_the_older_spelling_works_without_a_device() -> None:
    from floatplan.cpu.amp import GradScaler, autocast

    a = torch.randn(4, 4)
    with autocast(policy=fp.Policy.unified(slow_kernels=True)):
        assert (a @ a).dtype is torch.bfloat16
    with autocast(enabled=False):
        assert (a @ a).dtype is torch.float32
    assert GradScaler(init_scale=4.0).get_scale() == 4.0
    assert isinstance(GradScaler(), fp.GradScaler)


def test_older_custom_functions_are_for_cuda() -> None:
    from floatplan.cuda.amp import custom_bwd, custom_fwd

    class Context:
        pass

    @custom_fwd
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @custom_fwd(cast_inputs=torch.float16)
    def cast_forward(ctx: Context, x: torch.Tensor) -> torch.dtype:
        return x.dtype

    @custom_bwd
    def backward(ctx: Context, grad: torch.Tensor) -> torch.Tensor:
        return grad

    ctx, x = Context(), torch.ones(2)
    assert torch.equal(forward(ctx, x), x * 2)
    assert cast_forward(ctx, x) is torch.float32
    assert torch.equal(backward(ctx, x), x)
