"""Names of parameters, by their place in the models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from floatplan.scaling.gradients import ParameterNames
from floatplan.scaling.measure import Measured, Part


class Names:
    """The parameters of models in the order of the models, which is mostly that of the forward.

    Args:
        models: with several, names begin with the number of theirs.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        names: list[str] = []
        self._parameters: list[Tensor] = []
        known: set[int] = set()
        for number, model in enumerate(models):
            for name, parameter in model.named_parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    self._parameters.append(parameter)
                    names.append(name if len(models) == 1 else f"{number}.{name}")
        self._names = tuple(names)

    @property
    def names(self) -> ParameterNames:
        """As of one group of an optimizer."""
        return ((self._names, len(self._names)),)

    def places(self, parameters: Iterable[Tensor]) -> list[int]:
        """Where each of ``parameters`` stands; those that are in no model come after all others."""
        known = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        return [known.get(id(p), len(known) + number) for number, p in enumerate(parameters)]


def placed(measured: Measured, places: Sequence[int]) -> Measured:
    """``measured`` of an optimizer with the places of its parameters in the models."""
    return tuple(
        replace(part, positions=[places[at] for at in part.positions]) if isinstance(part, Part) else part
        for part in measured
    )
