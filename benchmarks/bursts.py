"""Measuring several things in turn, each in a process of its own, in short bursts.

A drift of the machine (its clock, its neighbours) meets every process alike, so that ratios of times taken in
one round hold even where the times do not. torch.amp runs on torch's own kernels in its processes.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol


class LeftOut(Exception):
    """What was asked for cannot be measured here; the message says why."""


class Measured(Protocol):
    """What lives in a process and is measured.

    A class may have a static ``load(job)``, which is called before memory is counted, and its instances
    ``facts``, a dictionary of numbers that goes to the `Result`.
    """

    def time(self, count: int) -> float:
        """Seconds per repetition, over ``count`` of them."""

    def values(self, count: int) -> list[float]:
        """What the next ``count`` repetitions compute (losses), to compare between processes."""


@dataclass(frozen=True)
class Limits:
    """How long to measure.

    Attributes:
        bursts: rounds.
        seconds: length of a burst; it is one repetition at least.
        slowest: seconds that one repetition may take; what is slower is left out.
        values: repetitions before the clock starts, whose values are kept.
    """

    bursts: int
    seconds: float
    slowest: float
    values: int

    @property
    def longest(self) -> float:
        """Seconds that any answer may take: one that compiles, or several repetitions."""
        return 30 * self.slowest


@dataclass
class Result:
    """What one process answered.

    Attributes:
        seconds: per repetition, one number per round.
        values: of the first repetitions.
        peak: bytes that it took at its peak, beside torch itself; ``None`` if not known.
        facts: what the measured object says of itself.
        left_out: why there is nothing else; ``None`` if it was measured.
    """

    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    peak: int | None = None
    facts: dict[str, float] = field(default_factory=dict)
    left_out: str | None = None


def serve(
    pipe: Connection, make: Callable[[Any], Measured], job: Any, device: str, threads: int | None
) -> None:
    """In a process of its own: make what is measured, then answer questions until there are no more."""
    import torch

    from floatplan.errors import PrecisionWarning
    from floatplan.tasks.memory import meter_for

    warnings.simplefilter("ignore", PrecisionWarning)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        getattr(make, "load", lambda job: None)(job)
        meter = meter_for(torch.device(device))
        measured = make(job)
        pipe.send("ready")
        while (question := pipe.recv()) is not None:
            what, count = question
            if what == "peak":
                pipe.send(meter.peak())
            elif what == "facts":
                pipe.send(getattr(measured, "facts", {}))
            else:
                pipe.send(getattr(measured, what)(count))
                if what == "values":
                    meter.reset()  # the peak is that of steps, not of making the model
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:
        text = " ".join(str(error).split()).partition(". ")[0]
        pipe.send(LeftOut(text if isinstance(error, LeftOut) else f"{type(error).__name__}: {text}"))


class Worker:
    """A process that measures one thing, seen from outside."""

    def __init__(self, make: Callable[[Any], Measured], job: Any, device: str, threads: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, make, job, device, threads), daemon=True)
        self._process.start()
        theirs.close()
        self._has_answered = False

    def answer(self, patience: float, slow: str) -> Any:
        """What the process sends next.

        Raises:
            LeftOut: it cannot do it, has died, or needs longer than ``patience`` seconds.
        """
        self._has_answered = self._pipe.poll(patience)
        if not self._has_answered:
            raise LeftOut(slow)
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise LeftOut(f"its process died with exit status {self._process.exitcode}") from None
        if isinstance(answer, LeftOut):
            raise answer
        return answer

    def ask(self, what: str, count: int, patience: float, slow: str = "") -> Any:
        """Ask for ``what`` and wait for the answer."""
        with suppress(BrokenPipeError):  # `answer` says why it died
            self._pipe.send((what, count))
        return self.answer(patience, slow or f"{what} took more than {patience:.0f} s")

    def end(self) -> None:
        """End the process, which has a moment to end those that it started."""
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(5 if self._has_answered else 0)
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def race(
    jobs: dict[str, tuple[Callable[[Any], Measured], Any]],
    limits: Limits,
    device: str,
    threads: int | None,
    tell: Callable[[str], None] = lambda text: None,
    compiled: Container[str] = (),
) -> dict[str, Result]:
    """Measure all jobs in turn, round by round.

    Args:
        jobs: by name, a function of a module that makes what is measured, and its argument.
        limits: how long.
        device: "cpu" or "cuda".
        threads: of torch in each process; ``None`` leaves it to torch.
        tell: is called with what happens now.
        compiled: names of those whose first repetition may take long.
    """
    results = {name: Result() for name in jobs}
    workers = {name: Worker(make, job, device, threads) for name, (make, job) in jobs.items()}
    counts = {}

    @contextmanager
    def of(name: str) -> Iterator[Result]:
        """In this context ``name`` may turn out to be what cannot be measured."""
        try:
            yield results[name]
        except LeftOut as reason:
            results[name].left_out = str(reason)
            workers.pop(name).end()

    try:
        tell("starting processes")
        for name, worker in list(workers.items()):
            with of(name):
                worker.answer(limits.longest, "making its model took too long")
        for name, worker in list(workers.items()):
            tell(f"first steps of {name}")
            with of(name) as result:
                result.values, counts[name] = _prepare(worker, limits, name in compiled)
        for number in range(limits.bursts):
            tell(f"round {number + 1} of {limits.bursts}")
            forth_and_back = 1 if number % 2 == 0 else -1  # nobody always follows the same other
            for name, worker in list(workers.items())[::forth_and_back]:
                with of(name) as result:
                    result.seconds.append(worker.ask("time", counts[name], limits.longest))
        for name, worker in list(workers.items()):
            with of(name) as result:
                result.peak = worker.ask("peak", 1, limits.longest)
                result.facts = worker.ask("facts", 1, limits.longest)
    finally:
        for worker in workers.values():
            worker.end()
    return results


def _prepare(worker: Worker, limits: Limits, compiles: bool) -> tuple[list[float], int]:
    """The first values, and how many repetitions make a burst."""
    slow = f"one step takes more than {limits.slowest:g} s (--slowest)"
    values = worker.ask("values", 1, limits.longest if compiles else 3 * limits.slowest, slow)
    values += worker.ask("values", 1, limits.slowest, slow)
    values += worker.ask("values", max(0, limits.values - 2), limits.longest, slow)
    several = max(1, round(0.2 * limits.seconds / worker.ask("time", 1, limits.slowest, slow)))
    return values, max(1, round(limits.seconds / worker.ask("time", several, limits.longest)))
