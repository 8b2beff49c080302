"""``record``: write down what a training does, and every so often all that its numbers look like."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import nn

from floatplan.errors import RecordingError
from floatplan.recording.recording import Recording, checked_after
from floatplan.watch.steps import Sink
from floatplan.watch.tensorboard import TensorBoard, check_tensorboard

__all__ = ["Recording", "record", "recording_of"]


def record(
    folder: str | os.PathLike[str],
    models: nn.Module | Sequence[nn.Module] | None = None,
    *,
    every: int | None = None,
    precision: str = "",
    after: int = 0,
    live: bool = False,
    tensorboard: bool | str | os.PathLike[str] = False,
) -> Recording:
    """Write down what a training does, for ``floatplan report`` to show.

    Each step gets a line: loss, loss scale, gradient norm, whether it was taken or why not, what its phases
    took. At each 50th step, from the first on, or less often where it would cost more than 1 % of the time,
    numbers are counted: of what each module returns, of what flows back into it, of weights, their gradients
    and updates. From these follow what each format would lose, and how many updates rounding took. Nothing of
    the training changes, bit for bit.

    With an Amp: ``fp.Amp(model, optimizer, "fp16", record=fp.record("runs/x", every=100))``, or
    ``record="runs/x"`` for what is by default. In a loop of one's own::

        with fp.record("runs/x", model) as recording:
            for x, y in batches:
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                recording.step(loss)

    A file that cannot be written any more ends the recording with a warning, not the training.

    Args:
        folder: a new one, in which ``run.jsonl`` is written; or that of a run that a checkpoint goes on with.
        models: those of a loop without an Amp.
        every: steps from one count of numbers to the next, whatever it costs.
        precision: of a loop without an Amp, for the report.
        after: steps before the first, of a loop without an Amp that goes on from a checkpoint. (An Amp keeps
            them in its state.)
        live: show the course of the training on standard output: a line that moves in a terminal, else lines.
        tensorboard: write for TensorBoard, too: True for the folder, or another folder.

    Raises:
        TensorBoardMissing: it is not installed.
        RunFolderError: the folder is not empty, or cannot be one.
        RecordingError: an argument does not fit.
    """
    recording = Recording(folder, every, _sinks(folder, live, tensorboard))
    recording.is_live = live
    if models is not None:
        found = [models] if isinstance(models, nn.Module) else list(models)
        if not found or not all(isinstance(model, nn.Module) for model in found):
            raise RecordingError(f"models must be a torch.nn.Module or several, got {models!r}")
        recording.go_on_after(checked_after(after))
        recording.attach(found, precision, 1, own=True)
    elif after:
        raise RecordingError("after= is of a loop without an Amp, whose models are given, too")
    return recording


def _sinks(
    folder: str | os.PathLike[str], live: bool, tensorboard: bool | str | os.PathLike[str]
) -> list[Callable[[], Sink]]:
    """What else is told of the records, made when the first step begins."""
    made: list[Callable[[], Sink]] = []
    if live:
        made.append(_view)
    if tensorboard:
        check_tensorboard()
        made.append(partial(TensorBoard, folder if tensorboard is True else tensorboard))
    return made


def _view() -> Sink:
    from floatplan.report.live import view_for  # and rich, which trainings that nobody looks at do without

    view = view_for()
    view.__enter__()
    return view


def recording_of(
    given: str | os.PathLike[str] | Recording | None,
    models: Iterable[nn.Module],
    precision: str,
    accumulate: int,
) -> Recording | None:
    """What records the training of an Amp that was given this.

    Raises:
        RecordingError: it is no folder and no recording, or one of another training.
        RunFolderError: the folder cannot be one.
    """
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike | Recording):
        raise RecordingError(f"record must be a folder or fp.record(folder), got {given!r}")
    recording = given if isinstance(given, Recording) else record(given)
    recording.attach(models, precision, accumulate)
    return recording
