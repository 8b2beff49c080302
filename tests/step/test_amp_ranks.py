"""`fp.Amp` on two gloo processes: one decision, also where only one of them sees the reason.

The cases run on both ranks, in one pair of processes for all; the tests compare what the ranks noted.
"""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from small import equal
from torch import Tensor, nn
from torch import distributed as dist
from two_ranks import SLOW, Case, Training, X, Y, decision, flat, run_cases, spoils

import floatplan as fp

KINDS = [(name, precision) for name in ("sgd", "adamw", "fused adamw") for precision in ("fp32", "fp16")]
kinds = pytest.mark.parametrize(("name", "precision"), KINDS, ids=[" ".join(kind) for kind in KINDS])
ELSEWHERE = "overflow: gradients are not finite on another rank"
CASES: dict[str, Case] = {}


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    return run_cases(CASES, tmp_path_factory.mktemp("ranks"))


# --- An overflow on one rank ----------------------------------------------------------------------------

SEEDS = (0, 1)


@case
def overflows(rank: int) -> Any:
    found = {}
    for name, precision in KINDS:
        for seed in SEEDS:
            mine, alone = Training(name, precision), Training(name, precision, shared=False)
            for number, spoil in enumerate(spoils(seed, 24)):
                mine.step(number, spoil[1] if spoil and spoil[0] == rank else None)
                alone.step(number, spoil[1] if spoil else None)
            found[name, precision, seed] = mine.everything(), alone.everything()
    return found


@pytest.mark.trouble("T50")
@pytest.mark.parametrize("seed", SEEDS)
@kinds
def test_an_overflow_on_one_rank_is_one_of_all(noted: Any, name: str, precision: str, seed: int) -> None:
    (first, alone), (second, _) = (of_rank[name, precision, seed] for of_rank in noted["overflows"])
    plan = spoils(seed, 24)
    assert {spoil[0] for spoil in plan if spoil} == {0, 1}
    for number, (spoil, *rows) in enumerate(zip(plan, first["rows"], second["rows"], strict=True)):
        assert decision(rows[0]) == decision(rows[1])
        assert torch.equal(rows[0]["weights"], rows[1]["weights"])
        assert rows[0]["stepped"] is (spoil is None)
        if spoil is None:
            assert equal(*rows)
            assert (rows[0]["reason"], rows[0]["culprit"]) == ("stepped", None)
            continue
        here, elsewhere = rows[spoil[0]], rows[1 - spoil[0]]
        assert here["culprit"] is not None
        assert "another rank" not in here["reason"]
        assert elsewhere["culprit"] is None
        if any(row["stepped"] for row in first["rows"][:number]) or precision == "fp32":
            assert elsewhere["reason"] == ELSEWHERE
        else:
            assert elsewhere["reason"].startswith("calibrating: the scale 65536 overflows on another rank;")

    # One process that meets what both met.
    for mine, theirs in zip(first["rows"], alone["rows"], strict=True):
        assert decision(mine) == decision(theirs)
        assert torch.equal(mine["weights"], theirs["weights"])
        assert torch.equal(mine["statistics"], theirs["statistics"])
    for part in ("optimizer", "amp", "scheduler"):
        assert equal(first[part], second[part])
        assert equal(first[part], alone[part])
    assert (len({row["scale"] for row in first["rows"]}) > 2) is (precision == "fp16")


# --- A rank without gradients ---------------------------------------------------------------------------


def reaching(count: int) -> list[tuple[bool, bool]]:
    """Per step, on which ranks the loss depends on the parameters."""
    draw = random.Random(0)
    return [(draw.random() < 0.6, draw.random() < 0.6) for _ in range(count)]


@case
def without_gradients(rank: int) -> Any:
    found = {}
    for name, precision in KINDS:
        mine = Training(name, precision)
        for number, (reaches, spoil) in enumerate(zip(reaching(30), spoils(3, 30), strict=True)):
            what = spoil[1] if spoil and spoil[0] == rank and reaches[rank] else None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                mine.step(number, what, reaches[rank], clip_norm=0.5)
            mine.rows[-1]["said"] = [str(warning.message) for warning in caught]
        found[name, precision] = mine.rows
    return found


@pytest.mark.trouble("T52")
@kinds
def test_a_rank_without_gradients_takes_part(noted: Any, name: str, precision: str) -> None:
    ranks = [of_rank[name, precision] for of_rank in noted["without_gradients"]]
    seen = set()
    for number, (reaches, spoil) in enumerate(zip(reaching(30), spoils(3, 30), strict=True)):
        rows = [of_rank[number] for of_rank in ranks]
        is_bad = spoil is not None and reaches[spoil[0]]
        seen.add((reaches, is_bad))
        assert decision(rows[0]) == decision(rows[1])
        assert rows[0]["stepped"] is (any(reaches) and not is_bad)
        assert rows[0]["found_inf"] is is_bad
        for rank, row in enumerate(rows):
            nobody = "no parameter of the optimizer has a gradient, so there is nothing to step with"
            assert [said.partition(";")[0] for said in row["said"]] == (
                [] if any(reaches) else [f"Amp.step: {nobody}"]
            )
            if not any(reaches):
                assert (row["reason"], row["scale"]) == (nobody, row["scale"])
            if number and (is_bad or not reaches[rank]):
                assert torch.equal(row["weights"], ranks[rank][number - 1]["weights"])
            elif number:
                assert not torch.equal(row["weights"], ranks[rank][number - 1]["weights"])
        if is_bad and spoil is not None:
            assert "on another rank" in rows[1 - spoil[0]]["reason"]
            assert "on another rank" not in rows[spoil[0]]["reason"]
    assert len(seen) == 7  # nobody; one, the other, both of them, with an overflow and without


# --- Micro-batches --------------------------------------------------------------------------------------


@case
def drops(rank: int) -> Any:
    found = {}
    for name, precision in KINDS:
        both = []
        for shared in (True, False):
            training = Training(name, precision, shared, accumulate=4, on_bad_micro_batch="drop")
            for number, spoil in enumerate(spoils(5, 22)):
                training.step(number, spoil[1] if spoil and (spoil[0] == rank or not shared) else None)
            training.note(training.amp.flush())
            both.append(training.everything())
        found[name, precision] = both
    return found


@pytest.mark.trouble("T26")
@pytest.mark.trouble("T50")
@kinds
def test_what_is_bad_on_one_rank_is_dropped_on_all(noted: Any, name: str, precision: str) -> None:
    (first, alone), (second, _) = (of_rank[name, precision] for of_rank in noted["drops"])
    spoiled = spoils(5, 22)
    rows = list(zip(*(one.pop("rows") for one in (first, second, alone)), strict=True))
    for spoil, here in zip(spoiled, rows, strict=False):
        reasons = [row.pop("reason") for row in here]
        culprits, _ = ([row.pop(name) for row in here] for name in ("culprit", "grad_norm"))
        if any(reason.startswith("micro-batch dropped: ") for reason in reasons):
            assert spoil is not None
            assert "on another rank" in reasons[1 - spoil[0]]
            assert [culprit is None for culprit in culprits[:2]] == [spoil[0] == 1, spoil[0] == 0]
        assert equal(here[0], here[1])
        assert equal(here[0], here[2])
    assert equal(first, second)
    assert equal(first, alone)
    first = {"rows": [row for row, *_ in rows]}
    good = [spoil is None for spoil in spoils(5, 22)]
    ends = [any(good[number - 3 : number + 1]) for number in (3, 7, 11, 15, 19)]
    assert [row["stepped"] for row in first["rows"][3:20:4]] == ends
    assert first["rows"][-1]["stepped"] is any(good[20:])
    assert sum(row["stepped"] for row in first["rows"]) == sum(ends) + any(good[20:])


@case
def in_ddp(rank: int) -> Any:
    found = {}
    for name, precision in KINDS:
        mine = Training(name, precision, ddp=True, accumulate=2)
        for number in range(20):
            is_bad = number in (5, 12, 13) and rank == number % 2
            mine.step(2 * number + rank, ("input", float("inf")) if is_bad else None, clip_norm=0.1)
        plain = Training(name, "fp32", shared=False, ddp=True)
        for number in (number for number in range(20) if number // 2 not in (2, 6)):
            (plain.loss(2 * number + rank) / 2).backward()
            if number % 2:
                norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1).item()
                plain.optimizer.step()
                plain.optimizer.zero_grad()
                plain.scheduler.step()
                plain.rows.append({"grad_norm": norm, "weights": flat(plain.net.parameters())})
        found[name, precision] = mine.everything(), plain.rows
    return found


@pytest.mark.trouble("T50")
@kinds
def test_in_distributed_data_parallel(noted: Any, name: str, precision: str) -> None:
    """Accumulation without ``no_sync``, other data on each rank, clipping by the norm of the mean."""
    (first, plain), (second, _) = (of_rank[name, precision] for of_rank in noted["in_ddp"])
    for row, other in zip(first["rows"], second["rows"], strict=True):
        own = {"statistics": None, "reason": None}
        assert equal({**row, **own}, {**other, **own})
    for part in ("optimizer", "amp", "scheduler"):
        assert equal({**first[part], "statistics": None}, {**second[part], "statistics": None})
    ends = first["rows"][1::2]
    assert all(row["statistics"].isfinite().all() for row in [*ends, *second["rows"][1::2]])
    assert [number for number, row in enumerate(ends) if not row["stepped"]] == [2, 6]
    assert ends[2]["culprit"] is not None
    assert second["rows"][5]["reason"].startswith("forward")
    assert ends[2]["reason"] == "overflow: gradients are not finite"  # which the mean brought there
    taken = [row for row in ends if row["stepped"]]
    loose = {"rtol": 0.02, "atol": 5e-3} if precision == "fp16" else {"rtol": 1e-5, "atol": 1e-6}
    for row, expected in zip(taken, plain, strict=True):
        assert row["grad_norm"] > 0.1
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=loose["rtol"])
        torch.testing.assert_close(row["weights"], expected["weights"], **loose)


def sharded_or_whole(precision: str, rank: int | None) -> list[Any]:
    """A training that FSDP shards, with half of each batch on each rank; or whole, on one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2))
    if rank is not None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    group = None if rank is None else dist.group.WORLD
    amp = fp.Amp(net, optimizer, precision, accumulate=2, clip_norm=0.05, group=group, settings=SLOW)
    rows = []
    for number, x, y in zip(range(12), X, Y, strict=False):
        x = x.clone()
        if number in (4, 9):
            x[number, 1] = torch.inf  # of rank 0, and of rank 1
        half = slice(None) if rank is None else slice(8 * rank, 8 * rank + 8)
        with amp.autocast():
            loss = nn.functional.cross_entropy(net(x[half]), y[half])
        result = amp.step(loss)
        if number % 2:
            weights = [getattr(p, "full_tensor", p.clone)() for p in net.parameters()]
            rows.append((bool(result), result.culprit, result.next_scale, result.grad_norm, flat(weights)))
    return rows


@case
def fsdp(rank: int) -> Any:
    return {
        precision: (sharded_or_whole(precision, rank), sharded_or_whole(precision, None))
        for precision in ("fp32", "fp16")
    }


@pytest.mark.trouble("T53")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_sharded_parameters(noted: Any, precision: str) -> None:
    (first, whole), (second, _) = (of_rank[precision] for of_rank in noted["fsdp"])
    assert equal(first, second)
    assert [row[0] for row in first] == [True, True, False, True, False, True]
    loose = {"rtol": 0.02, "atol": 2e-3} if precision == "fp16" else {"rtol": 1e-5, "atol": 1e-6}
    for mine, expected in zip(first, whole, strict=True):
        assert mine[:3] == expected[:3]
        assert mine[3] == pytest.approx(expected[3], rel=loose["rtol"], nan_ok=True)
        torch.testing.assert_close(mine[4], expected[4], **loose)


# --- Functions of the loss ------------------------------------------------------------------------------


def evaluations(mine: Training, bad: int | None, factor: float = 1.0) -> int:
    """A step with a function whose evaluation ``bad`` is not finite; how often it was called."""
    count = 0

    def loss_of() -> Tensor:
        nonlocal count
        count += 1
        return mine.loss(0, ("input", float("nan")) if count == bad else None) * factor

    mine.note(mine.amp.step(loss_of))
    return count


BAD = {1: (0, 1), 2: (1, 4), 3: (1, 1), 4: (0, 3)}
"""By step: on which rank which evaluation is not finite."""


@case
def lbfgs(rank: int) -> Any:
    found = {}
    for precision in ("fp32", "fp16"):
        mine, counts = Training("lbfgs", precision, init_scale=1024.0), []
        mine.net.eval()
        for step in range(6):
            before = copy.deepcopy(mine.optimizer.state_dict())
            who, at = BAD.get(step, (None, None))
            count = evaluations(mine, at if who == rank else None)
            counts.append((count, equal(before, mine.optimizer.state_dict())))
        found[precision] = mine.everything(), counts
    return found


@pytest.mark.trouble("T31")
@pytest.mark.trouble("T50")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_evaluation_that_is_bad_on_one_rank_ends_the_step_of_all(noted: Any, precision: str) -> None:
    (first, counts), (second, other_counts) = (of_rank[precision] for of_rank in noted["lbfgs"])
    assert counts == other_counts
    for step, *rows in zip(range(6), first["rows"], second["rows"], strict=True):
        assert decision(rows[0]) == decision(rows[1])
        assert torch.equal(rows[0]["weights"], rows[1]["weights"])
        assert rows[0]["stepped"] is (step not in BAD)
        if step in BAD:
            who, at = BAD[step]
            assert counts[step] == (at, True)
            assert rows[who]["culprit"] is not None
            assert (rows[1 - who]["culprit"], rows[1 - who]["reason"]) == (None, ELSEWHERE)
    assert equal(first["optimizer"], second["optimizer"])


@case
def lbfgs_of_different_lengths(rank: int) -> Any:
    """Rank 1 has no slope to follow and is through after one evaluation, rank 0 goes on."""
    mine = Training("lbfgs", "fp32")
    mine.net.eval()
    counts = [evaluations(mine, bad if rank == 0 else None, 1.0 - rank) for bad in (None, 3, None)]
    return mine.rows, counts


@pytest.mark.trouble("T50")
def test_ranks_need_not_evaluate_equally_often(noted: Any) -> None:
    (first, counts), (second, other_counts) = noted["lbfgs_of_different_lengths"]
    assert (counts, other_counts) == ([5, 3, 5], [1, 1, 1])
    for row, other in zip(first, second, strict=True):
        assert decision(row) == decision(other)
    assert [row["stepped"] for row in first] == [True, False, True]
    assert second[1]["reason"] == ELSEWHERE


@case
def lbfgs_that_ends_in_infinity(rank: int) -> Any:
    """Every gradient is 1; only on rank 1 does the weight leave the range, after the last evaluation."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, -2e38 * rank)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=3e38, max_iter=1)
    amp = fp.Amp(model, optimizer, "fp32", group=dist.group.WORLD)
    result = amp.step(lambda: model.weight.sum())
    return bool(result), result.reason, model.weight.item(), copy.deepcopy(optimizer.state_dict()["state"])


@pytest.mark.trouble("T50")
def test_a_weight_that_is_infinite_on_one_rank_ends_the_step_of_all(noted: Any) -> None:
    first, second = noted["lbfgs_that_ends_in_infinity"]
    assert first == (False, ELSEWHERE, 0.0, {})
    assert second == (False, "overflow: gradients are not finite", torch.tensor(-2e38).item(), {})
