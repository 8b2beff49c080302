"""Real architectures train in 16 bits as they do in float32: a BERT, a Llama and a T5, made from configs.

The measure is the loss at every one of 20 steps, relative to that of a float32 training that starts alike and
sees the same batches. Each step has a new batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch

import floatplan as fp
from floatplan.errors import RegionError
from floatplan.watch.drift import Drift, drift

pytest.importorskip("transformers", reason="the test extra has it")
import small_transformers
from small_transformers import FORMATS, LEARNING_RATES, MODELS, STEPS, Run, batch, make, train

UNIFIED, SLOW = fp.Policy.unified(), fp.Policy.unified(slow_kernels=True)
REGIONS = {"bf16": ("bf16", UNIFIED), "fp16": ("fp16", UNIFIED), "fp16 on slow kernels": ("fp16", SLOW)}

pytestmark = pytest.mark.filterwarnings(
    "ignore:in this autocast region on cpu:floatplan.errors.PrecisionWarning"
)
each_model = pytest.mark.parametrize("name", MODELS)


@cache
def in_float32(name: str) -> Run:
    return train(name, make(name), nullcontext, None)


def agrees(what: str, name: str, run: Run, figure: Callable[[str], None]) -> None:
    """The loss falls by a third, and is never more than 2 % off that of float32."""
    exact = in_float32(name).losses
    deviations = [abs(mine - wanted) / wanted for mine, wanted in zip(run.losses, exact, strict=True)]
    figure(f"{what}: loss at most {max(deviations):.3%} from float32's, {exact[0]:.2f} to {exact[-1]:.2f}")
    assert len(deviations) == STEPS
    assert max(deviations) <= 0.02
    assert max(run.losses[-3:]) < run.losses[0] * 2 / 3


@each_model
@pytest.mark.parametrize("kind", REGIONS)
def test_eager_training(kind: str, name: str, figure: Callable[[str], None]) -> None:
    word, policy = REGIONS[kind]
    region = fp.autocast("cpu", dtype=FORMATS[word], policy=policy)
    run = train(name, make(name), lambda: region, FORMATS[word])
    agrees(f"{name} {kind} eager, region", name, run, figure)
    assert run.calls == in_float32(name).calls == STEPS
    if policy is SLOW:
        assert run.products == ["torch.float16"]


@each_model
@pytest.mark.parametrize("word", FORMATS)
def test_no_module_is_farther_from_float32_than_its_format_explains(
    word: str, name: str, figure: Callable[[str], None]
) -> None:
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATES[name])
    shares = []
    for step in range(1, STEPS + 1):
        given = batch(name, step)
        if step in (1, 5, 20):
            region = fp.autocast("cpu", dtype=FORMATS[word], policy=SLOW)
            found = drift(model, lambda given=given: model(**given).loss, lambda r=region: r, scale=1024.0)
            assert isinstance(found, Drift), found
            assert not found.leaves, (step, found)
            assert found.gradients < 0.1
            shares.append(found.worst.share)
        optimizer.zero_grad()
        model(**given).loss.backward()
        optimizer.step()
    figure(f"drift of {name} in {word}: at most {max(shares):.2f} of what is explained")


@each_model
@pytest.mark.parametrize("word", FORMATS)
def test_eager_training_with_a_plan(word: str, name: str, figure: Callable[[str], None]) -> None:
    model = make(name)
    fp.Plan.parse(f'[default]\nprecision = "{word}"').apply(model)
    run = train(name, model, nullcontext, FORMATS[word])
    agrees(f"{name} {word} eager, plan", name, run, figure)


@pytest.mark.trouble("T114")
@pytest.mark.trouble("T115")
@pytest.mark.parametrize("arguments", [(), ("slow_kernels",)], ids=["usual kernels", "slow kernels"])
def test_checkpointed_training(arguments: tuple[str, ...], figure: Callable[[str], None]) -> None:
    """In a process of its own: one policy is in use there, so that recomputation knows its region's."""
    done = subprocess.run(
        [sys.executable, str(Path(small_transformers.__file__)), *arguments],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # small products: threads that wait for each other
    )
    assert done.returncode == 0, done.stderr
    runs = {what: Run(*values) for what, values in json.loads(done.stdout).items()}
    assert len(runs) == (6 if arguments else 24)
    for what, run in runs.items():
        kernels = " on slow kernels" if arguments else ""
        agrees(what.replace(" checkpointed", f"{kernels} checkpointed"), what.split()[0], run, figure)
        assert run.calls == 2 * STEPS  # each layer is computed twice
        assert len(run.products) == 1  # in one precision
        if arguments:
            assert run.products == ["torch.float16"]


@pytest.mark.trouble("T114")
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_among_several_policies_says_what_to_do(reentrant: bool) -> None:
    for policy in (UNIFIED, SLOW):
        with fp.autocast("cpu", dtype=torch.bfloat16, policy=policy):
            loss = make("llama", reentrant)(**batch("llama", 0)).loss
    with pytest.raises(RegionError, match="Enter the region inside the checkpointed function, give"):
        loss.backward()


LAYERS = {
    "bert": ["bert.encoder.layer.*"],
    "llama": ["model.layers.*"],
    "t5": ["encoder.block.*", "decoder.block.*"],
}


@pytest.mark.trouble("T114")
@each_model
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_plan_that_names_the_checkpointed_layers(
    reentrant: bool, name: str, figure: Callable[[str], None]
) -> None:
    """Exact among several policies, and the layers are still recomputed."""
    rules = [f'[[rule]]\nmodule = "{module}"\nprecision = "bf16"' for module in LAYERS[name]]
    model = make(name, reentrant)
    fp.Plan.parse("\n".join(['[default]\nprecision = "bf16"', *rules])).apply(model)
    run = train(name, model, nullcontext, torch.bfloat16)
    agrees(f"{name} bf16 checkpointed, plan for the layers", name, run, figure)
    assert (run.calls, run.products) == (2 * STEPS, ["torch.bfloat16"])
