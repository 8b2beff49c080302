"""The file of costs: what it is good for, and what becomes of one that is not."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from floatplan.tune import costs as costs_module
from floatplan.tune.calls import OperatorCall, TensorSpec
from floatplan.tune.costs import Costs, default_folder

CPU, BF16 = torch.device("cpu"), torch.bfloat16
NEG = OperatorCall("aten::neg", (TensorSpec(BF16, (3,)),))


def known(path: Path) -> dict[str, dict[str, float]]:
    seconds: dict[str, dict[str, float]] = json.loads(path.read_text())["seconds"]
    return seconds


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    first = Costs(CPU, BF16, tmp_path / "new")
    cost = first.of(NEG)
    assert cost is not None
    assert first.measured == 1
    assert first.keep() == f"kept in {first.path}"
    again = Costs(CPU, BF16, tmp_path / "new")
    assert again.of(NEG) == cost
    assert again.found == {"aten::neg(bf16[3])"}
    assert again.measured == 0


def test_formats_and_writers_share_a_file(tmp_path: Path) -> None:
    one, other = Costs(CPU, BF16, tmp_path), Costs(CPU, torch.float16, tmp_path)
    one.of(NEG)
    other.of(OperatorCall("aten::neg", (TensorSpec(torch.float16, (3,)),)))
    one.cast((2, 2), True)
    other.cast((2, 2), True)
    for costs in (one, other):
        costs.keep()
    assert one.path == other.path
    found = known(one.path)
    assert set(found) == {"aten::neg(bf16[3])", "aten::neg(f16[3])", "cast [2,2]'"}
    assert set(found["cast [2,2]'"]) == {"fp32", "bf16", "fp16"}


@pytest.mark.parametrize("change", ["torch", "floatplan", "device", "threads", "allocator"])
def test_costs_of_anything_else_are_stale(tmp_path: Path, change: str) -> None:
    costs = Costs(CPU, BF16, tmp_path)
    costs.of(NEG)
    costs.keep()
    content = json.loads(costs.path.read_text())
    assert change in content["measured with"]
    content["measured with"][change] = "another"
    costs.path.write_text(json.dumps(content))
    again = Costs(CPU, BF16, tmp_path)
    again.of(NEG)
    assert again.measured == 1
    again.keep()
    assert json.loads(costs.path.read_text())["measured with"][change] != "another"


def test_other_threads_have_another_file(tmp_path: Path) -> None:
    before, count = Costs(CPU, BF16, tmp_path).path, torch.get_num_threads()
    torch.set_num_threads(count + 1)
    try:
        assert Costs(CPU, BF16, tmp_path).path != before
    finally:
        torch.set_num_threads(count)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"floatplan operator costs": 2}',
        '{"floatplan operator costs": 1}',
        "[" * 100_000,
        "\ud800",
    ],
)
def test_a_file_that_is_damaged_is_measured_anew(tmp_path: Path, text: str) -> None:
    costs = Costs(CPU, BF16, tmp_path)
    costs.path.write_bytes(text.encode(errors="surrogatepass"))
    again = Costs(CPU, BF16, tmp_path)
    assert again.of(NEG) is not None
    again.keep()
    assert Costs(CPU, BF16, tmp_path).of(NEG) is not None


@pytest.mark.parametrize(
    "cost", [None, 3, {}, {"fp32": 1.0}, {"fp32": -1, "bf16": 1}, {"fp32": "1", "bf16": 1}]
)
def test_a_cost_that_is_none_is_measured_anew(tmp_path: Path, cost: object) -> None:
    costs = Costs(CPU, BF16, tmp_path)
    costs.of(NEG)
    costs.keep()
    content = json.loads(costs.path.read_text())
    content["seconds"]["aten::neg(bf16[3])"] = cost
    costs.path.write_text(json.dumps(content))
    again = Costs(CPU, BF16, tmp_path)
    again.of(NEG)
    assert again.measured == 1


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    costs = Costs(CPU, BF16, tmp_path / "file")
    costs.of(NEG)
    assert "could not be written" in costs.keep()


def test_on_a_busy_machine_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_module, "BUSY", -1.0)
    costs = Costs(CPU, BF16, tmp_path)
    costs.of(NEG)
    assert "not kept" in costs.keep()
    assert not list(tmp_path.iterdir())


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path: Path) -> None:
    def write(size: int) -> None:
        costs = Costs(CPU, BF16, tmp_path)
        costs.of(OperatorCall("aten::neg", (TensorSpec(BF16, (size,)),)))
        costs.keep()

    threads = [threading.Thread(target=write, args=(size,)) for size in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = tmp_path.iterdir()
    assert known(path)


def test_an_operator_that_does_not_run_alone_is_named_and_counts_nothing(tmp_path: Path) -> None:
    costs = Costs(CPU, BF16, tmp_path)
    bad = OperatorCall("aten::mm", (TensorSpec(BF16, (3,)), TensorSpec(BF16, (3,))))
    assert costs.of(bad) is None
    assert "RuntimeError" in costs.failed[bad.text]


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "floatplan"
