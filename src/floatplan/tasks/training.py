"""One training of a task by `floatplan.Amp`, in this process, that can be stopped and goes on bit by bit."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from floatplan.checkpoint import ResumableLoader, load, save
from floatplan.engine import precision_notes
from floatplan.errors import CheckpointMissingError, DataError, DeviceError, RunFolderError, TaskError
from floatplan.loop import Amp
from floatplan.recording import Recording
from floatplan.records import StepResult
from floatplan.report.runfile import PLAN_FILE, RunWriter
from floatplan.step.optimize import check_needs_no_function
from floatplan.tasks.batches import Fetched, batches_on, number_of, random_states_kept, seed_all
from floatplan.tasks.comparison import check_device
from floatplan.tasks.memory import meter_for
from floatplan.tasks.options import TrainingOptions
from floatplan.tasks.registry import recipe_named
from floatplan.tasks.rows import lacks_bf16
from floatplan.tasks.stopping import StopWish
from floatplan.tasks.task import DataSource, Ingredients, Task, constant
from floatplan.tasks.train import accuracy_of, check_trainable, optimizer_of
from floatplan.tasks.unrecorded import Course
from floatplan.tune.measure import hardware_notes
from floatplan.watch.steps import Sink

CHECKPOINT_FILE = "checkpoint.pt"


class Training:
    """A training that is ready to run: its folder is there, and nothing is written yet.

    Args:
        options: with their defaults.
        folder: of the run.
        view: shows the course of the training; made when the first step begins.
        resume: go on from the checkpoint in ``folder``, with those of its options that are not given here.

    Attributes:
        options: all of them.
        total: steps there will be; None where only going through the data tells.
        steps: optimizer steps that are over, skipped ones included.
        evaluations: step and accuracy of each.

    Raises:
        TaskError: options or a task that cannot be trained.
        DeviceError: a device or a format that is not there.
        DataError: data that cannot be read.
        PlanError: a plan that does not fit the model.
        StepError: an optimizer that does not fit the model.
        RunFolderError: the folder is not empty, or cannot be one.
        CheckpointError: there is no checkpoint to go on from, or it does not fit.
    """

    def __init__(
        self,
        options: TrainingOptions,
        folder: Path,
        view: Callable[[Training], Sink] | None = None,
        *,
        resume: bool = False,
    ) -> None:
        self.folder, self.checkpoint = folder, folder / CHECKPOINT_FILE
        self.options = self._resumed(options) if resume else options.with_defaults()
        if not resume:
            RunWriter.check(folder)
        given = self.options
        self.device = check_device(str(given.device))
        if given.precision in ("bf16", "auto") and lacks_bf16(self.device):
            name = torch.cuda.get_device_name(self.device)
            raise DeviceError(f"--precision {given.precision} needs bf16, which {name} has not; use fp16")
        self.steps, self.evaluations = 0, list[tuple[int, float]]()
        self._epoch, self._in_window = 1, 0

        self.task = self._made()
        self.total = self._steps_in_all()
        self._sinks = [] if view is None else [partial(view, self)]
        self.recording = Recording(folder, None, self._sinks) if given.record else None
        self._course = None if given.record else Course(self.device, self._sinks)
        if self.recording is not None:
            self.recording.is_live = view is not None
        self._make_amp()
        if resume:
            self._load()
        self._make_folder()

    def _make_folder(self) -> None:
        """Now, and not after hours of training, it shows whether there can be one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            why = "" if os.access(self.folder, os.W_OK) else os.strerror(errno.EACCES)
        except OSError as error:
            why = str(error.strerror)
        if why:
            raise RunFolderError(f"cannot write a run folder at {self.folder}: {why}; choose another")

    def _resumed(self, asked: TrainingOptions) -> TrainingOptions:
        try:
            entries = load(self.checkpoint)
        except CheckpointMissingError:
            raise CheckpointMissingError(
                f"there is no {self.checkpoint} to go on from; name the folder of a training with --out, or "
                "leave out --resume to start one"
            ) from None
        return TrainingOptions.saved(entries.get("options")).going_on(asked)

    def _made(self) -> Task:
        """The task on its device, and its batches; weights and order follow the seed."""
        given, device = self.options, self.device
        seed = int(given.seed or 0)
        folder = None if given.data is None else Path(given.data)
        if folder is not None and not folder.is_dir():
            raise DataError(f"data folder {folder} does not exist; name one that does")
        recipe = recipe_named(str(given.task))
        make = recipe.prepare(Ingredients(device, seed, given.batch_size, DataSource(folder)))
        self.memory = meter_for(device)
        seed_all(seed)
        task = make()
        task.model.to(device)
        batches = batches_on(device, task.data)
        check_trainable(recipe.name, task, batches.samples()[0])
        self.memory.reset()
        # Where a loader gives batches one by one, it is the loader whose place is kept.
        is_fetched = isinstance(batches, Fetched)
        self.loader: ResumableLoader[Any] = ResumableLoader(task.data if is_fetched else batches)
        self._batches = Fetched(self.loader, device) if is_fetched else self.loader
        return task

    def _steps_in_all(self) -> int | None:
        given = self.options
        if given.steps is not None:
            return given.steps
        per_epoch = number_of(self.task.data)
        if per_epoch is not None:
            return self._epochs * math.ceil(per_epoch / (given.accumulate or 1))
        if self.task.schedule is not constant:
            raise TaskError(
                f"{given.task}: a schedule needs to know the number of batches, and the data has no len(); "
                "give it a __len__, leave the schedule out, or say --steps"
            )
        return None

    @property
    def _epochs(self) -> int:
        return self.options.epochs or self.task.epochs

    def _make_amp(self) -> None:
        given, task = self.options, self.task
        self.optimizer = optimizer_of(task, task.model)
        check_needs_no_function((self.optimizer,))
        if given.lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = given.lr
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.amp = Amp(
            task.model,
            self.optimizer,
            given.plan or given.precision,  # type: ignore[arg-type]
            accumulate=given.accumulate or 1,
            clip_norm=given.clip_norm,
            record=self.recording,
        )

    def _rate(self, done: int) -> float:
        """Factor on the learning rate after so many steps that were not skipped."""
        if self.total is None:
            return 1.0
        return self.task.schedule(min(done, self.total - 1) / self.total)

    # --- Going on -------------------------------------------------------------------------------------

    def _objects(self) -> dict[str, Any]:
        return {
            "amp": self.amp,
            "model": self.task.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
        }

    def save(self) -> None:
        """Write the checkpoint; between steps only.

        Raises:
            CheckpointError: it cannot be written. The one before is as it was.
        """
        if self.recording is not None:
            self.recording.flush()
        progress = {"epoch": self._epoch, "steps": self.steps, "evaluations": self.evaluations}
        save(self.checkpoint, **self._objects(), progress=progress, options=self.options.as_dict())
        if self.amp.plans and not (self.folder / PLAN_FILE).exists():
            self.amp.plans[0].save(self.folder / PLAN_FILE)

    def _load(self) -> None:
        rest = load(self.checkpoint, **self._objects())
        progress = rest["progress"]
        self._epoch, self.steps = progress["epoch"], progress["steps"]
        self.evaluations = [tuple(one) for one in progress["evaluations"]]
        if self.options.steps is not None and self.options.steps < self.steps:
            raise TaskError(
                f"{self.folder} holds a training of {self.steps} steps already; --steps counts those, too"
            )

    # --- Training -------------------------------------------------------------------------------------

    def run(self, wish: StopWish, say: Callable[[str], None] = lambda line: None) -> bool:
        """Train to the end, or until a signal came; then the checkpoint holds the last step.

        Args:
            wish: to stop; looked at after each step.
            say: is told each evaluation in a line.

        Returns:
            Whether the training is over.

        Raises:
            FloatplanError: a step, the evaluation or the checkpoint failed.
        """
        try:
            for _ in self._steps():
                if self._is_due(self.options.evaluate_every):
                    self._evaluate(say)
                if wish.signal is not None:
                    self.save()
                    return False
                if self._is_due(self.options.checkpoint_every):
                    self.save()
            self._evaluate(say)
            self.save()
            return True
        finally:
            self.close()

    def close(self) -> None:
        """Write what waits of the recording, and end the view."""
        for one in (self.recording, self._course):
            if one is not None:
                one.close()

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.steps % every == 0

    def _steps(self) -> Iterator[None]:
        """Train; a yield after each optimizer step."""
        limit = self.options.steps
        while self.steps < limit if limit is not None else self._epoch <= self._epochs:
            gave_one = self.loader.is_within_epoch
            if not gave_one:
                seed_all(int(self.options.seed or 0) + self._epoch * 2**32)
            for batch in self._batches:
                gave_one = True
                if self._micro_batch(batch):
                    yield
                    if self.steps == limit:
                        return
            if not gave_one:
                raise TaskError(
                    f"{self.options.task}: data gave no batch in epoch {self._epoch}; it must begin anew "
                    "each time"
                )
            self._epoch += 1
            last = self.amp.flush(scheduler=self.scheduler)
            if last is not None:
                self._ended(last)
                yield

    def _micro_batch(self, batch: Any) -> bool:
        """Whether it ended a step."""
        if self._course is not None:
            self._course.begins()
        with self.amp.autocast():
            loss: Tensor = self.task.loss(self.task.model, batch)
        result = self.amp.step(loss, scheduler=self.scheduler)
        if self._course is not None:
            self._course.loss(loss)
        self._in_window += 1
        if self._in_window < self.amp.accumulate:
            return False
        self._ended(result)
        return True

    def _ended(self, result: StepResult) -> None:
        self.steps += 1
        if self._course is not None:
            self._course.step_ended(self.steps, result, self._in_window)
        self._in_window = 0

    def _evaluate(self, say: Callable[[str], None]) -> None:
        """Once per step; leaves random states as they are, so that how often does not change the training."""
        if self.evaluations and self.evaluations[-1][0] == self.steps:
            return
        with random_states_kept():
            accuracy = accuracy_of(self.task, self.task.model, self.amp.autocast())
        if accuracy is not None:
            self.evaluations.append((self.steps, accuracy))
            say(f"step {self.steps:,}: accuracy {100 * accuracy:.2f} %")

    def notes(self) -> tuple[str, ...]:
        """What must be known of this precision on this device, in sentences."""
        choice, precision = self.amp.choice, str(self.options.precision)
        if choice is not None:
            return (choice.sentences()[0],)
        if precision not in ("bf16", "fp16"):
            return ()
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        return precision_notes(self.device.type, dtype) or hardware_notes(self.device, precision)
