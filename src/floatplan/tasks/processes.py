"""Each training in a fresh process: clean memory peaks, torch's own kernels in torch's rows."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from floatplan.errors import FloatplanError
from floatplan.records import FailureRecord, RunRecord
from floatplan.tasks.train import Job, train
from floatplan.tune.host import tune_host


def run_apart(job: Job) -> Generator[RunRecord]:
    """What `train` yields for ``job``, from a new process; a `FailureRecord` last if it did not finish.

    The process ends with the iteration: closing the iterator early (Ctrl-C too) ends it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    # No daemon, whose data loaders could not have workers; it ends below, or at its next word to nobody.
    process = context.Process(target=_child, args=(theirs, job))
    with _interrupts_ignored():
        process.start()
    theirs.close()
    finished = False
    try:
        while not finished:
            record: RunRecord | None = ours.recv()
            finished = record is None
            if record is not None:
                yield record
    except EOFError:
        process.join()
        yield FailureRecord(job.row, job.seed, _cause_of_death(process.exitcode))
    finally:
        ours.close()
        if not finished:
            process.terminate()
        process.join()


def _child(records: Connection, job: Job) -> None:
    tune_host()  # for every row alike
    try:
        try:
            for record in train(job):
                records.send(record)
        except Exception as error:
            records.send(FailureRecord(job.row, job.seed, _in_one_line(error)))
        records.send(None)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the command is gone; nobody is left to tell


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A process started in this context ignores Ctrl-C, also while it imports.

    A terminal sends Ctrl-C to parent and child; the parent ends the child, which should not print a
    traceback of its own. Python only changes signal handlers in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, FloatplanError):
        return text
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate" in text:
        return f"out of memory; a smaller --batch-size may fit ({text})"
    return f"{type(error).__name__}: {text}"


def _cause_of_death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = ", as when the system runs out of memory" if -exit_code == signal.SIGKILL else ""
        return f"its process was killed by {name}{hint}"
    return f"its process ended without a result, with exit status {exit_code}"
