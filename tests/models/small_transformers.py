"""A BERT, a Llama and a T5 of the transformers library, small and made from configs, and their training.

As a program it trains them all with checkpointing, in a process of its own in which one policy is in use, and
prints what came out as JSON: ``python small_transformers.py [slow_kernels]``.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import floatplan as fp

STEPS = 20
VOCABULARY, LENGTH, BATCH = 32, 16, 8
MASK, IGNORED = 1, -100
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}

# No dropout: the random numbers of a mask are others in another format, and so would the losses be.


def bert() -> PreTrainedModel:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=128, max_position_embeddings=LENGTH, use_cache=False,
        )
    )  # fmt: skip


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
            feed_forward_proj="gated-gelu", decoder_start_token_id=0, use_cache=False,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"bert": bert, "llama": llama, "t5": t5}
LEARNING_RATES = {"bert": 3e-3, "llama": 3e-3, "t5": 1e-3}
INNER = {"bert": "query", "llama": "q_proj", "t5": "SelfAttention.q"}
"""A module inside of the layers that the library checkpoints: how its name ends."""


def batch(name: str, step: int) -> dict[str, Tensor]:
    """Sequences that count on from a random token, with what is to be learnt of them: shape (8, 16).

    Every second one is padded at its end, so that attention has a mask.
    """
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(2, VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (first + torch.arange(LENGTH)) % (VOCABULARY - 2) + 2
    present = torch.ones_like(tokens)
    present[::2, -4:] = 0
    labels = (tokens.flip(1) if name == "t5" else tokens).masked_fill(present == 0, IGNORED)
    if name == "bert":
        tokens = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.15, MASK)
    return {"input_ids": tokens, "attention_mask": present, "labels": labels}


class Run(NamedTuple):
    """What a training gave.

    Attributes:
        losses: of each step.
        calls: forwards of one module inside a layer, recomputed ones included, in all steps.
        products: the dtypes that the products of that module came out in.
    """

    losses: list[float]
    calls: int
    products: list[str]


def make(name: str, reentrant: bool | None = None) -> PreTrainedModel:
    """A model that always starts alike; its layers are checkpointed unless ``reentrant`` is None."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    if reentrant is not None:
        with warnings.catch_warnings():
            # Every version of the library has this name, though newer ones have another, too.
            warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def train(name: str, model: PreTrainedModel, region: Callable[[], Any], low: torch.dtype | None) -> Run:
    """Twenty steps of AdamW, the forward in ``region()``; in fp16 the loss is scaled."""
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=LEARNING_RATES[name])
    scaler = fp.GradScaler("cpu", init_scale=1024.0, enabled=low is torch.float16)
    inner = next(part for path, part in model.named_modules() if path.endswith(INNER[name]))
    seen: list[torch.dtype] = []
    inner.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with region():
            loss = model(**batch(name, step)).loss
        scaler.scale(loss).backward()
        result = scaler.step(optimizer)
        assert result or low is not torch.float16, result
        scaler.update()
        losses.append(loss.item())
    return Run(losses, len(seen), sorted({str(dtype) for dtype in seen}))


def checkpointed_runs(slow_kernels: bool) -> dict[str, Run]:
    """Each model and kind of checkpointing, in regions and plans that lie around the checkpointed layers.

    A plan has no word for ``slow_kernels``, and bf16 is the same with it wherever bf16 has a kernel at all.
    """
    policy = fp.Policy.unified(slow_kernels=slow_kernels)
    runs = {}
    for name, word, reentrant in itertools.product(MODELS, FORMATS, (False, True)):
        if slow_kernels and word == "bf16":
            continue
        low = FORMATS[word]
        region = fp.autocast("cpu", dtype=low, policy=policy)
        kind = f"{name} {word} checkpointed, {'reentrant' if reentrant else 'not reentrant'}"
        runs[f"{kind}, region"] = train(name, make(name, reentrant), lambda r=region: r, low)
        if not slow_kernels:
            model = make(name, reentrant)
            fp.Plan.parse(f'[default]\nprecision = "{word}"').apply(model)
            runs[f"{kind}, plan"] = train(name, model, nullcontext, low)
    return runs


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "in this autocast region on cpu", fp.PrecisionWarning)
    print(json.dumps(checkpointed_runs(slow_kernels="slow_kernels" in sys.argv)))
