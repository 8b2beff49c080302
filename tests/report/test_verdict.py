"""What is said of a training: true of its tensors, and no more than its records hold."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy
import pytest
import torch
from recorded import STEPS, Net, recorded, said

import floatplan as fp
from floatplan.policy import ModuleRule, Plan
from floatplan.records import (
    Diagnosis,
    FindingRecord,
    LostUpdates,
    NumbersKind,
    NumbersRecord,
    TrainedStep,
)
from floatplan.report.numbers import share
from floatplan.report.ranges import module_rows
from floatplan.report.runfile import TrainingRun
from floatplan.report.safety import at_scale, innermost, largest_scale
from floatplan.report.verdict import safety_grid, verdict
from floatplan.watch.histogram import numbers_of


def with_numbers(*records: NumbersRecord, precision: str = "fp16") -> TrainingRun:
    """Ten good steps at scale 1024, and these numbers."""
    steps = tuple(
        TrainedStep(n, True, "stepped", 1024.0, 1024.0, 1.0, None, 0, 1.0 / n) for n in range(1, 11)
    )
    header = replace(recorded().run.header, precision=precision, modules=tuple(r.module for r in records))
    return TrainingRun(header, steps, records)


def numbers(
    what: NumbersKind, name: str, values: list[float], dtype: str = "fp16", scale: float = 1.0, step: int = 1
) -> NumbersRecord:
    return NumbersRecord(step, what, name, dtype, scale, numbers_of(torch.tensor(values)))


# --- Of the training that really ran --------------------------------------------------------------------


def test_the_headline_names_what_went_wrong() -> None:
    found = verdict(recorded().run)
    assert found.level == "bad"
    assert f"step {STEPS} was bad and hot overflows fp16" in found.headline


def test_modules_that_fp16_is_too_narrow_for_are_named_with_their_shares() -> None:
    made = recorded()
    hot = numpy.concatenate([a for _, a in made.arrays("activation", "hot")])
    wide = numpy.concatenate([a for _, a in made.arrays("activation", "wide")])
    one = next(one for one in verdict(made.run).statements if one.topic == "overflow")
    assert one.level == "bad"
    assert one.bf16 == ("hot", "wide")
    assert f"hot ({share(numpy.mean(~numpy.isfinite(hot)))} of its activations are not finite" in one.text
    assert f"wide ({share(numpy.mean(abs(wide) > 65504))} of its activations pass 65,504" in one.text
    assert f"the largest is {abs(wide).max():,.0f}" in one.text


def test_gradients_that_underflow_are_named_and_what_another_scale_does() -> None:
    made = recorded()
    skipped = {one.step for one in made.run.steps if not one.stepped}
    scales = {one.step: one.scale for one in made.run.steps}
    faint = [(s, abs(a)) for s, a in made.arrays("gradient", "faint") if s not in skipped]
    used = numpy.concatenate([a for _, a in faint])
    one = next(o for o in verdict(made.run).statements if o.topic == "underflow" and o.level == "note")
    assert f"faint ({share(numpy.mean(used[used > 0] <= 2.0**-25))})" in one.text
    largest = 0.0
    for what in ("gradient", "weight gradient"):
        for module in made.run.header.modules:
            for step, array in made.arrays(what, module):  # type: ignore[arg-type]
                if step not in skipped:
                    by = scales[step] if what == "gradient" else 1.0
                    largest = max(largest, float(abs(array).max()) / by)
    best = largest_scale(made.run)
    assert best == 2.0 ** math.floor(math.log2(65504 / largest))
    at_best = numpy.concatenate([a[a > 0] * best / scales[s] for s, a in faint])
    assert at_scale(made.run, "faint", best) == pytest.approx(numpy.mean(at_best < 2.0**-25))
    without = numpy.concatenate([a[a > 0] / scales[s] for s, a in faint])
    assert at_scale(made.run, "faint", 1.0) == pytest.approx(numpy.mean(without < 2.0**-25))


def test_lost_updates_are_told_in_all_formats() -> None:
    made = recorded()
    weights = [triple for named in made.weights.values() for triple in named.values()]
    taken = sum(int((g != 0).sum()) for _, _, g in weights)
    lost = sum(int(((b == a) & (g != 0)).sum()) for b, a, g in weights)
    half = sum(
        int(((b.astype(numpy.float16) == a.astype(numpy.float16)) & (g != 0)).sum()) for b, a, g in weights
    )
    text = said(made.run, "updates").text
    assert f"Of the updates of weights in fp32, {share(lost / taken)} rounded away" in text
    assert f"{share(half / taken)} in fp16" in text
    assert "look at the learning rate" in text


def test_the_course_of_the_scale_and_its_skips_are_told() -> None:
    made = recorded()
    skipped = [one for one in made.run.steps if not one.stepped]
    text = said(made.run, "scale").text
    assert text.startswith(f"The loss scale went from 1,048,576 to {made.run.steps[-1].next_scale:,.0f}: it ")
    assert f"{len(skipped)} of {STEPS} steps were skipped, the last at step {skipped[-1].step}" in text
    losses = [one.loss for one in made.run.steps if one.loss is not None]
    ends = numpy.mean(losses[:4]), numpy.mean(losses[-4:])
    assert f"from {ends[0]:.2f} to {ends[1]:.3f}" in said(made.run, "loss").text


def test_the_finding_is_told_with_its_step() -> None:
    text = said(recorded().run, "findings").text
    assert text.startswith(f"Step {STEPS}: In the batch: ")
    assert "torch.isfinite" in text


def test_the_plan_is_one_and_can_be_read() -> None:
    plan = Plan.parse(verdict(recorded().run).plan)
    assert plan.default == "fp16"
    assert [(rule.module, rule.precision) for rule in plan.rules] == [
        ("hot", "bf16"),
        ("wide", "bf16"),
        ("faint", "bf16"),
    ]
    assert plan.precisions(recorded().run.header.modules)["hot"].precision == "bf16"


def test_trained_by_that_plan_nothing_overflows() -> None:
    torch.manual_seed(0)
    model = Net()
    text = verdict(recorded().run).plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp.PrecisionWarning)  # of a CPU without fp16 units
        fp.Plan.parse(text).apply(model)
        seen: list[torch.Tensor] = []
        for module in (model.hot, model.wide):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output))
        model(torch.randn(64, 12))
    assert all(output.isfinite().all() for output in seen)
    assert seen[0].dtype == torch.bfloat16


def test_safe_kinds_and_formats() -> None:
    grid = safety_grid(module_rows(recorded().run))
    assert list(grid) == ["activation", "gradient", "weight gradient", "weight", "update"]
    assert grid["activation"]["fp16"] == ("risk", "1 not finite, 1 overflow, of 12")
    assert grid["gradient"]["fp16"] == ("avoid", "1 underflow, of 12"), "faint lies in float32"
    assert grid["activation"]["bf16"][0] == "unknown"
    assert grid["gradient"]["bf16"] == ("safe", "all 12 fit")
    assert grid["update"]["fp8_e5m2"] == ("unknown", "7 of 7: not recorded")


# --- Of other trainings ----------------------------------------------------------------------------------


def test_a_training_with_room_is_healthy() -> None:
    run = with_numbers(
        numbers("activation", "a", [1.0, 1000.0]), numbers("gradient", "a", [0.5, 3.0], scale=1024.0)
    )
    found = verdict(run)
    assert (found.level, found.plan) == ("good", "")
    assert found.headline.startswith("Healthy: nothing went wrong in 10 steps")
    assert found.headline.endswith("no recorded module is at risk in fp16.")
    text = said(run, "overflow").text
    assert "recorded modules at step 1: the largest is 1,000 in a, 6.0 powers of two below 65,504" in text
    assert "none are subnormal" in said(run, "underflow").text


def test_a_precision_that_nothing_ran_in_is_told() -> None:
    dtypes = ("fp32", "fp32", "fp16")
    run = with_numbers(*(numbers("activation", f"m{n}", [1.0], dtype) for n, dtype in enumerate(dtypes)))
    one = said(run, "precision")
    assert (one.level, one.text) == (
        "good",
        "Of the recorded modules, 2 returned fp32 and 1 returned fp16.",
    )
    nowhere = with_numbers(numbers("activation", "a", [1.0], "fp32"))
    one = said(nowhere, "precision")
    assert one.level == "note"
    assert one.text.startswith("fp16 was asked for, and no recorded module returned it: 1 returned fp32.")
    assert "fp.Settings(policy=fp.Policy.unified(slow_kernels=True))" in one.text
    full = with_numbers(numbers("activation", "a", [1.0], "fp32"), precision="fp32")
    assert not [one for one in verdict(full).statements if one.topic == "precision"]


def test_nothing_is_said_of_kinds_that_were_not_recorded() -> None:
    found = verdict(with_numbers())
    assert {one.topic for one in found.statements} == {"loss", "scale"}
    assert found.headline == "Healthy: nothing went wrong in 10 steps; no numbers were recorded."
    assert verdict(TrainingRun(recorded().run.header)).headline == "No step was recorded."


def test_a_bf16_training_is_told_what_fp16_would_do_and_is_well() -> None:
    run = with_numbers(
        numbers("activation", "a", [1.0, 2.0], "bf16"),
        numbers("activation", "a.b", [1e5, 1.0, 1.0, 1.0], "bf16"),
        numbers("activation", "c", [1.0], "bf16"),
        precision="bf16",
    )
    one = said(run, "overflow")
    assert (one.level, one.short, one.bf16) == ("note", "a.b would overflow fp16", ("a.b",))
    assert "but a.b (25 % of its activations pass 65,504, the largest is 100,000)" in one.text
    assert verdict(run).level == "note"


def test_a_module_near_the_limit_is_a_note_with_a_rule() -> None:
    run = with_numbers(
        *(numbers("activation", name, [v]) for name, v in (("a", 4e4), ("b", 1.0), ("c", 2.0)))
    )
    one = said(run, "overflow")
    assert (one.level, one.bf16) == ("note", ("a",))
    assert "0.7 powers of two below 65,504" in one.text
    assert 'module = "a"' in verdict(run).plan


def test_later_modules_are_not_blamed_for_what_they_received() -> None:
    inf = math.inf
    run = with_numbers(
        numbers("activation", "", [inf]),
        numbers("activation", "a", [1.0]),
        numbers("activation", "b", [inf, 6e4]),
        numbers("activation", "c", [inf, 1.0]),
        numbers("activation", "d", [inf, 2.0]),
    )
    one = said(run, "overflow")
    assert one.bf16 == ("b",)
    assert "What is not finite in 2 other modules may have come from there" in one.text
    assert "1 module around" in one.text


def test_modules_without_a_finite_number_only_received_it() -> None:
    inf, nan = math.inf, math.nan
    run = with_numbers(
        numbers("activation", "block", [inf, 6e4], "fp32"),
        numbers("activation", "block.mlp", [inf, 6e4]),
        numbers("activation", "norm", [nan, nan], "fp32"),
        numbers("activation", "head", [nan, nan]),
    )
    one = said(run, "overflow")
    assert one.bf16 == ("block.mlp",)
    assert "not finite in 3 other modules may have come from there" in one.text
    assert Plan.parse(verdict(run).plan).rules == (ModuleRule("block.mlp", "bf16"),)


def test_what_is_not_finite_before_an_overflow_did_not_come_from_it() -> None:
    run = with_numbers(
        numbers("activation", "a", [math.nan, 1.0], "fp32"), numbers("activation", "b", [math.inf, 6e4])
    )
    texts = [one.text for one in verdict(run).statements if one.topic == "overflow"]
    assert texts[0].startswith("50 % of the activations of a (fp32) are not finite, from step 1 on.")
    assert texts[1].startswith("fp16 is safe for all recorded layers but b")


def test_what_is_not_finite_in_bf16_is_no_matter_of_fp16() -> None:
    run = with_numbers(numbers("activation", "a", [math.nan, 1.0], "bf16", step=3), precision="bf16")
    one = said(run, "overflow")
    assert (one.level, one.bf16) == ("bad", ())
    assert "50 % of the activations of a (bf16) are not finite, from step 3 on" in one.text


def test_a_bad_batch_is_no_matter_of_formats() -> None:
    numbers_of_both = (
        numbers("activation", "a", [1.0, 2.0], step=1),
        numbers("activation", "a", [math.nan, 1.0], step=3),
    )
    run = with_numbers(*numbers_of_both)
    assert said(run, "overflow").level == "bad"
    for where, level in (("input", "good"), ("weight", "good"), ("forward", "bad")):
        found = Diagnosis(False, "a", "", where, "cause", "fix")  # type: ignore[arg-type]
        with_finding = replace(run, findings=(FindingRecord(3, found),))
        assert said(with_finding, "overflow").level == level


def test_gradients_at_the_lower_end_of_fp16_get_a_scale_or_a_rule() -> None:
    low = numbers("gradient", "a", [2.0**-20, 2.0**-21, 1.0, 0.0], scale=1024.0)
    one = said(with_numbers(low), "underflow")
    assert "a (67 %; 25 % are 0)" in one.text
    assert "A loss scale of 3.36e+07 would still keep the largest below 65,504" in one.text
    assert one.bf16 == ()
    tops = numbers("gradient", "b", [6e4], scale=1024.0)
    found = verdict(with_numbers(low, tops)).statements
    one = next(one for one in found if one.topic == "underflow")
    assert "A larger loss scale would overflow elsewhere" in one.text
    assert one.bf16 == ("a",)


def test_gradients_that_a_loss_scale_would_save_are_no_reason_to_worry() -> None:
    run = with_numbers(numbers("gradient", "a", [1e-8, 1e-3], "bf16"), precision="bf16")
    one = said(run, "underflow")
    assert (one.level, one.bf16) == ("good", ())
    assert "Without a loss scale, gradients would underflow in fp16 in a (50 %)" in one.text
    assert "below 65,504 is 3.36e+07; with it 0 % underflow in a" in one.text
    wide = with_numbers(numbers("gradient", "a", [1e-8, 5e4], "bf16"), precision="bf16")
    one = said(wide, "underflow")
    assert (one.level, one.bf16) == ("note", ("a",))
    assert "No scale helps a: run it in bf16." in one.text


def test_a_plan_for_most_modules_is_bf16_altogether() -> None:
    run = with_numbers(numbers("activation", "a", [math.inf]))
    assert Plan.parse(verdict(run).plan) == Plan("bf16")


def test_a_training_by_a_plan_gets_rules_to_add() -> None:
    made = recorded().run
    text = verdict(replace(made, header=replace(made.header, precision="plan"))).plan
    assert text.startswith('[[rule]]\nmodule = "hot"\n')
    assert Plan.parse('[default]\nprecision = "bf16"\n' + text).rules


def test_updates_lost_in_low_weights_are_bad() -> None:
    run = replace(
        with_numbers(numbers("update", "a.w", [1.0], "bf16")),
        lost=(LostUpdates(1, "a.w", "bf16", 4, 3, {}),),
    )
    one = said(run, "updates")
    assert one.level == "bad"
    assert "75 % rounded away (most in a: 75 %). Keep the weights in float32" in one.text


def test_the_innermost_are_those_with_none_inside() -> None:
    rows = module_rows(with_numbers(*(numbers("activation", n, [1.0]) for n in ("", "a", "a.b", "ab"))))
    assert [row.module for row in innermost(rows)] == ["a.b", "ab"]
