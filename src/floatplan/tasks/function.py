"""A user's task: a function that the command line names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.errors import TaskError, nearest
from floatplan.tasks.batches import check_restartable
from floatplan.tasks.task import Ingredients, Task

RETURN_THIS = "return fp.Task(model, data, loss), or the tuple (model, data, loss)"


@dataclass(frozen=True)
class FunctionRecipe:
    """Makes the task that a function returns.

    Attributes:
        name: ``package.module:function`` or ``path/to/file.py:function``.
    """

    name: str

    def prepare(self, given: Ingredients) -> Callable[[], Task]:
        """Import the function; what is returned calls it and checks what comes back.

        Raises:
            TaskError: no such module or function, or the module cannot be imported; later: the function
                raised, or returned something that is no task.
        """
        if given.batch_size is not None:
            raise TaskError(f"{self.name} makes its own batches; leave out --batch-size")
        function = self._function()

        def make() -> Task:
            try:
                made = function()
            except (Exception, SystemExit) as error:
                raise TaskError(f"{self.name} raised {what_was_raised(error)}") from error
            return _checked(self.name, made)

        return make

    def describe(self) -> str:
        """The first line of what the function, or its module, says of itself."""
        function = self._function()
        told = inspect.getdoc(function) or inspect.getdoc(inspect.getmodule(function)) or ""
        first = told.strip().partition("\n")[0]
        return first.rstrip(".") or f"What {self.name} returns"

    def _function(self) -> Callable[[], Any]:
        place, _, attribute = self.name.rpartition(":")
        if not place or not attribute:
            raise TaskError(
                f"--task {self.name!r} names no function; write module:function or file.py:function"
            )
        found: Any = _imported(place, self.name)
        for part in attribute.split("."):
            owner, found = found, getattr(found, part, None)
            if found is None:
                known = [name for name in dir(owner) if callable(getattr(owner, name, None))]
                raise TaskError(f"{place} has no function {attribute!r}{nearest(part, known)}")
        if not callable(found):
            raise TaskError(
                f"{self.name} is a {type(found).__name__} and no function; {RETURN_THIS} from one"
            )
        function: Callable[[], Any] = found
        return function


def _imported(place: str, name: str) -> ModuleType:
    """The module called ``place``, or that of the file; the current directory comes first."""
    is_file = place.endswith(".py")
    folder = str(Path(place).resolve().parent) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _of_file(Path(place).resolve()) if is_file else importlib.import_module(place)
    except ModuleNotFoundError as error:
        if not is_file and error.name and f"{place}.".startswith(f"{error.name}."):
            raise TaskError(
                f"--task {name!r}: there is no module {error.name!r} in {folder} or on Python's path; "
                "a file is named as path/to/file.py:function"
            ) from error
        raise TaskError(f"--task {name!r}: importing {place} raised {what_was_raised(error)}") from error
    except FileNotFoundError as error:
        if Path(place).exists():
            raise TaskError(f"--task {name!r}: importing {place} raised {what_was_raised(error)}") from error
        raise TaskError(f"--task {name!r}: there is no file {place}") from error
    except (Exception, SystemExit) as error:
        raise TaskError(f"--task {name!r}: importing {place} raised {what_was_raised(error)}") from error


def _of_file(path: Path) -> ModuleType:
    """Imported under the name of the file, unless that is taken by another module."""
    for name in (path.stem, f"task_in_{path.stem}"):
        known = sys.modules.get(name)
        if known is None:
            break
        if getattr(known, "__file__", None) == str(path):
            return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _checked(name: str, made: Any) -> Task:
    if isinstance(made, tuple) and len(made) == 3:
        made = Task(*made)
    if not isinstance(made, Task):
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise TaskError(f"{name} returned {got}; {RETURN_THIS}")
    if not isinstance(made.model, nn.Module):
        raise TaskError(f"{name}: the model is a {type(made.model).__name__} and no torch.nn.Module")
    for what, value, takes in (
        ("loss", made.loss, "the model and a batch"),
        ("optimizer", made.optimizer, "the parameters, as in lambda p: torch.optim.SGD(p, lr=0.1)"),
        ("evaluate", made.evaluate or bool, "the model"),
        ("schedule", made.schedule, "the share of training done"),
    ):
        if not callable(value):
            raise TaskError(f"{name}: {what} is a {type(value).__name__}; give a function of {takes}")
    if type(made.epochs) is not int or made.epochs < 1:
        raise TaskError(f"{name}: epochs must be 1 or more, not {made.epochs!r}")
    try:
        check_restartable(name, made.data)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"{name}: the data raised {what_was_raised(error)}") from error
    return made


def loss_of(name: str, task: Task, batch: Any) -> Tensor:
    """The task's loss on ``batch``.

    Raises:
        TaskError: it raised, or is not one number with a graph.
    """
    try:
        loss = task.loss(task.model, batch)
    except Exception as error:
        raise TaskError(f"{name}: the loss raised {what_was_raised(error)}") from error
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad and not loss.is_complex():
        return loss
    got = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        got = f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
    raise TaskError(f"{name}: the loss must be one number with a graph, as of .mean(); it is {got}")


def what_was_raised(error: BaseException) -> str:
    """Type, message, and the line that raised, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else text


def _is_library(filename: str) -> bool:
    """Whether a frame is of floatplan, torch, Python, or what is installed beside them."""
    if filename.startswith("<"):
        return True
    library = (Path(torch.__file__).parents[1], Path(os.__file__).parent, Path(__file__).parents[1])
    return any(Path(filename).is_relative_to(folder) for folder in library)
