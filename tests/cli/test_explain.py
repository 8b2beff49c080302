"""``floatplan explain`` from the command line to the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from floatplan.cli import run

OWN_TASK = """
import torch

class Net(torch.nn.Linear):
    def forward(self, x, *, offset):
        return super().forward(x) + offset

def make():
    batch = {"x": torch.ones(3, 4), "offset": torch.ones(2)}
    return Net(4, 2), [batch], lambda model, batch: model(batch["x"], offset=batch["offset"]).sum()
"""
PLAN = '[default]\nprecision = "bf16"\n\n[[rule]]\nmodule = "0"\nprecision = "fp32"\n'


def said(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run(["explain", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_network_of_a_task_operator_by_operator(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys)
    assert out.startswith("ConvNet on cpu in bfloat16, policy unified")
    assert re.search(r"│ 3 \(Conv2d\) +│ conv2d +│ +1 │ bfloat16, float32 │ bfloat16 +│", out)
    assert re.search(r"^11 operator calls \(8 in bfloat16, 3 in float32\); 6 casts, [\d,]+ bytes", out, re.M)
    assert re.search(r"^1: convolution: most of the arithmetic", out, re.M)


def test_lines_per_module_or_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"│ 11 \(Linear\) +│ +1 │ 1 bfloat16 │", said(capsys, "--by", "module"))
    out = said(capsys, "--by", "operator", "--dtype", "fp16")
    assert re.search(r"│ conv2d +│ +3 │ 3 float32 +│ +│ +│", out)
    assert "kept in float32" not in out


def test_json_and_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "explain.html"
    out = said(capsys, "--task", "digits-linear", "--policy", "torch", "--json", "--html", str(page))
    found = json.loads(out)
    assert (found["dtype"], found["policy"], found["totals"]["casts"]) == ("bfloat16", "torch cpu", 3)
    assert [row["operator"] for row in found["rows"]] == ["aten::linear"]
    assert "Linear on cpu in bfloat16, policy torch cpu" in page.read_text(encoding="utf-8")
    out = said(capsys, "--task", "digits-linear", "--html", str(page))
    assert out.splitlines()[-1] == f"page: {page}"


def test_torchs_cuda_table_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "--policy", "torch-cuda", "--json"))
    assert found["policy"] == "torch cuda"


def test_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    found = json.loads(said(capsys, "--plan", str(tmp_path / "plan.toml"), "--json"))
    assert (found["dtype"], found["policy"]) == (None, None)
    reasons = {row["module"]: row["why"] for row in found["rows"]}
    assert reasons["0"] == "the plan says fp32 (rule 1, '0')"
    assert reasons["3"].endswith("[plan: bf16 (default)]")


def test_a_task_of_ones_own_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_TASK, encoding="utf-8")
    found = json.loads(said(capsys, "--task", f"{tmp_path / 'mine.py'}:make", "--json"))
    assert found["model"] == "Net"
    assert [row["operator"] for row in found["rows"]] == ["aten::linear", "aten::add.Tensor"]
    sys.modules.pop("mine")
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--task", "digitz"], "no task 'digitz'; did you mean 'digits'"),
        (["--dtype", "bf61"], "--dtype 'bf61' is not known; did you mean 'bf16'"),
        (["--dtype", "int8"], "--dtype 'int8' is not known; there is: bf16, fp16, fp32"),
        (["--policy", "unifide"], "--policy 'unifide' is not known; did you mean 'unified'"),
        (["--by", "moduel"], "--by 'moduel' is not known; did you mean 'module'"),
        (["--device", "tpu"], "no device 'tpu'"),
        (["--plan", "no.toml"], "cannot read the plan no.toml: No such file or directory"),
        (["--plan", "no.toml", "--dtype", "bf16"], "leave out --dtype and --policy, or --plan"),
        (["--html", "no/such/page.html"], "cannot write no/such/page.html"),
        (["--task", "mnist", "--data", "no/such"], "--task digits"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    options: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["explain", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("floatplan: ")
    assert err.count("\n") == 1
    assert says in err
    assert not list(tmp_path.iterdir())


def test_help_loads_no_torch() -> None:
    script = (
        "import sys; from floatplan.cli import run; status = run(['explain', '--help']); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--policy" in done.stdout
