"""A bundle replayed: the same fault, also in another process, and what is said where it is not the same."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty_tasks
import pytest
import torch

import floatplan as fp
from floatplan.checkpoint import Bundle, read_bundle, write_bundle
from floatplan.checkpoint.random_states import RandomStates
from floatplan.checkpoint.trees import Gap, Missing
from floatplan.cli import run
from floatplan.errors import BundleError
from floatplan.tasks.replay import replay

CPU = torch.device("cpu")
HERE = Path(faulty_tasks.__file__)


def kept(folder: Path, **more: Any) -> Bundle:
    """The bundle of a step of `Chancy` in which dropout left nothing, with weights of its own."""
    torch.manual_seed(11)
    task = faulty_tasks.chancy()
    (batch,) = task.data
    for _ in range(200):
        states = RandomStates().state_dict()
        found = fp.diagnose(task.model, lambda: task.loss(task.model, batch), precision="bf16")
        if not found.is_healthy:
            break
        torch.rand(1)
    assert found.module == "norm"
    given: dict[str, Any] = {"batch": batch, "random_states": states, "diagnosis": found}
    write_bundle(folder, task.model, ((batch[0],), {}), precision="bf16", **{**given, **more})
    return read_bundle(folder)


def test_a_fault_goes_wrong_again_in_another_process(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    recorded = kept(folder).diagnosis
    assert recorded is not None

    def command(*options: str) -> subprocess.CompletedProcess[str]:
        line = ["replay", str(folder), "--task", "faulty_tasks:chancy", *options]
        return subprocess.run(
            [sys.executable, "-m", "floatplan", *line], cwd=HERE.parent, capture_output=True, text=True
        )

    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    assert recorded.sentences()[0] in done.stdout
    assert done.stdout.splitlines()[-1] == "Reproduced: the same fault as recorded."

    done = command("--precision", "fp32", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["reproduced"]) == (0, True)
    assert told["differences"] == ["the precision is fp32 here and was bf16"]
    assert told["recorded"]["loss"] == "nan"
    assert replace(fp.Diagnosis.from_dict(told["recorded"]), loss=None) == replace(recorded, loss=None)
    assert (told["found"]["module"], told["found"]["precision"]) == ("norm", "fp32")


def test_without_its_random_numbers_or_modes_the_step_is_fine(tmp_path: Path) -> None:
    bundle = kept(tmp_path / "b")
    states = {**bundle.random_states, "torch": torch.Generator().manual_seed(5).get_state()}
    for changed in (replace(bundle, random_states=states), replace(bundle, training=frozenset())):
        result = replay(changed, faulty_tasks.chancy(), device=CPU)
        assert not result.reproduced
        assert result.found.is_healthy
        assert result.sentences()[1].startswith("Not reproduced. Recorded was: In the forward of norm")
    assert replay(bundle, faulty_tasks.chancy(), device=CPU).reproduced


def test_the_process_keeps_its_random_states_and_the_bundle_its_tensors(tmp_path: Path) -> None:
    bundle = kept(tmp_path / "b")
    before = {name: tensor.clone() for name, tensor in bundle.state.items()}
    torch.manual_seed(1)
    expected = torch.rand(2)
    task = faulty_tasks.chancy()
    torch.manual_seed(1)
    replay(bundle, task, device=CPU)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bundle.state.items())
    with torch.no_grad():
        task.model.first.weight.zero_()
    assert torch.equal(bundle.state["first.weight"], before["first.weight"])


def big_bundle(folder: Path, gradients: Any, **more: Any) -> Bundle:
    task = faulty_tasks.big()
    with torch.no_grad():
        task.model.up.weight.mul_(1e6)
    (x,) = task.data
    write_bundle(folder, task.model, ((x,), {}), precision="fp16", output_gradients=gradients, **more)
    return read_bundle(folder)


def test_arguments_and_gradients_of_outputs_stand_for_a_batch(tmp_path: Path) -> None:
    gradients = [torch.ones(3, 2), torch.full((3, 8), float("nan"))]
    result = replay(big_bundle(tmp_path / "a", gradients), faulty_tasks.big(), device=CPU, precision="bf16")
    assert result.reproduced, "any fault will do where none is recorded"
    assert (result.found.where, result.found.is_healthy) == ("loss", False)
    assert "the bundle has no batch: the gradients of the outputs stand for the loss" in result.differences
    assert "The bundle has no diagnosis to compare with." in result.sentences()
    healthy = replay(
        big_bundle(tmp_path / "b", [torch.ones(3, 2), None]), faulty_tasks.big(), device=CPU, precision="bf16"
    )
    assert not healthy.reproduced
    assert healthy.found.loss is not None
    neither = replay(big_bundle(tmp_path / "c", None), faulty_tasks.big(), device=CPU, precision="bf16")
    assert "the sum of the outputs stands for the loss" in neither.differences[0]


def test_gradients_begin_the_backward_as_they_were(tmp_path: Path) -> None:
    gradient = torch.randn(3, 2)
    bundle = big_bundle(tmp_path / "a", [gradient, None])
    task = faulty_tasks.big()
    from floatplan.tasks.replay import _load_state, _step

    _load_state(task.model, bundle)
    closure, _, _ = _step(task.model, task, bundle, CPU)
    closure().backward()
    expected = torch.einsum("bo,bh->oh", gradient, task.model(torch.ones(3, 4))[1]["hidden"])
    torch.testing.assert_close(task.model.down.weight.grad, expected)


def test_a_step_of_another_device_is_judged_in_its_format(tmp_path: Path) -> None:
    bundle = replace(big_bundle(tmp_path / "a", [torch.ones(3, 2), None]), device="cuda:0")
    result = replay(bundle, faulty_tasks.big(), device=CPU)
    assert (result.found.module, result.found.op) == ("up", "aten::linear")
    assert "overflow" in result.found.cause
    assert "the device is cpu here and was cuda:0" in result.differences


def test_a_plan_is_the_precision(tmp_path: Path) -> None:
    plan = fp.Plan.parse('[default]\nprecision = "bf16"\n\n[[rule]]\nmodule = "norm"\nprecision = "fp32"\n')
    bundle = replace(kept(tmp_path / "b"), precision=str(plan))
    result = replay(bundle, faulty_tasks.chancy(), device=CPU)
    assert result.found.precision == "plan"
    assert result.reproduced


def test_what_differs_is_said(tmp_path: Path) -> None:
    bundle = kept(tmp_path / "b")
    assert bundle.diagnosis is not None
    changed = replace(
        bundle,
        versions={**bundle.versions, "torch": "1.0"},
        gaps=(Gap("kwargs['cache']", "Cache"),),
        diagnosis=replace(bundle.diagnosis, cause="0/0 of old"),
    )
    result = replay(changed, faulty_tasks.chancy(), device=CPU)
    assert result.reproduced
    assert result.differences == (
        f"torch is {torch.__version__} here and was 1.0",
        "recorded as cause was: 0/0 of old",
        "not in the bundle as it was: kwargs['cache'] (Cache)",
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "other",
            r"\(Linear\) is not that of the bundle \(Chancy\): weight is not in the bundle; bias is not in "
            "the bundle; first.weight is only in the bundle; first.bias is only in the bundle, and 2 more",
        ),
        (
            "wider",
            r"first.weight is \[3, 5\] here and \[3, 4\] there; head.weight is torch.bfloat16 here and "
            "torch.float32 there",
        ),
    ],
)
def test_another_model_is_told_apart(task: str, message: str, tmp_path: Path) -> None:
    bundle = kept(tmp_path / "b")
    made = getattr(faulty_tasks, task)()
    with pytest.raises(BundleError, match=message):
        replay(bundle, fp.Task(*made), device=CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"batch": None, "args": (Missing("Cache"),), "gaps": (Gap("args[0]", "Cache"),)},
            r"no whole batch and no whole arguments; missing: args\[0\] \(Cache\)",
        ),
        ({"batch": None, "output_gradients": [torch.ones(9)]}, r"of shapes \[\(1, 2\)\], and .* \[\(9,\)\]"),
        (
            {"batch": None, "args": (torch.ones(1, 7),)},
            "cannot be run: it raised RuntimeError: mat1 and mat2",
        ),
        ({"random_states": {"torch": torch.ones(3)}}, "random states do not fit this Python"),
    ],
)
def test_a_bundle_that_cannot_run_says_why(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    bundle = replace(kept(tmp_path / "b"), **change)
    with pytest.raises(BundleError, match=message):
        replay(bundle, faulty_tasks.chancy(), device=CPU)


def test_the_command_says_1_where_it_is_not_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path / "b", diagnosis=fp.Diagnosis(False, "head", "aten::linear", "forward", "overflow", "rule"))
    line = ["replay", str(tmp_path / "b"), "--task", f"{HERE}:chancy"]
    assert run(line) == 1
    out = capsys.readouterr().out
    assert "Not reproduced. Recorded was: In the forward of head, aten::linear: overflow." in out
    for wrong, says in (
        ([*line, "--precision", "fp61"], "--precision 'fp61' is not known; did you mean 'fp16'"),
        (["replay", str(tmp_path), "--task", "digits"], "bundle.json: No such file"),
        (["replay", str(tmp_path / "b"), "--task", "digits"], "(ConvNet) is not that of the bundle (Chancy)"),
        (["replay", str(tmp_path / "b")], "--task"),
    ):
        assert run(wrong) == 2
        err = capsys.readouterr().err
        assert says in err
        assert err.count("\n") == 1
