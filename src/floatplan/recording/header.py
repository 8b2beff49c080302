"""The first line of a recorded training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime

import torch
from torch import nn

from floatplan.records import TrainingHeader
from floatplan.tune.measure import describe_device, describe_versions
from floatplan.watch.pace import EVERY, Pace
from floatplan.watch.statistics import Subject


def header_of(
    models: Sequence[nn.Module],
    subject: Subject,
    device: torch.device,
    precision: str,
    accumulate: int,
    pace: Pace,
    after: int,
) -> TrainingHeader:
    """What is trained, and where; ``after`` says how many steps were before."""
    said = []
    if subject.fused:
        names = ", ".join(name or "the model" for name in subject.fused[:6])
        said.append(f"compiled, so that only what comes out is seen, and no cast inside: {names}")
    if subject.scripted:
        names = ", ".join(name or "the model" for name in subject.scripted[:6])
        said.append(f"TorchScript, of which only parameters are seen: {names}")
    ranks = torch.distributed.get_world_size() if _has_ranks() else 1
    if ranks > 1:
        said.append(f"numbers are those of the first of {ranks} ranks")
    known = describe_device(device)
    return TrainingHeader(
        model=", ".join(type(model).__name__ for model in models),
        precision=precision,
        parameters=sum(p.numel() for p in subject.parameters.values() if p.requires_grad),
        modules=tuple(subject.modules),
        fingerprint=_fingerprint(subject),
        every=pace.every or EVERY,
        accumulate=accumulate,
        device=str(device),
        started=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions=describe_versions(),
        machine={"device": f"{known.model} ({', '.join(known.features)})"},
        ranks=ranks,
        notes=tuple(said),
        after=after,
    )


def _fingerprint(subject: Subject) -> str:
    shapes = "\n".join(f"{name} {tuple(p.shape)}" for name, p in subject.parameters.items())
    return hashlib.sha256(shapes.encode()).hexdigest()[:16]


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_first_rank() -> bool:
    """Whether this process writes."""
    return not _has_ranks() or torch.distributed.get_rank() == 0
