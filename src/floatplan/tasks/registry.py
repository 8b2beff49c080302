"""The tasks that commands know by name, and those of users."""

from __future__ import annotations

from floatplan.errors import TaskError, nearest
from floatplan.tasks.digits import DIGITS, DIGITS_LINEAR
from floatplan.tasks.function import FunctionRecipe
from floatplan.tasks.images import ImageRecipe
from floatplan.tasks.mnist import MNIST_RECIPE
from floatplan.tasks.task import Recipe
from floatplan.tasks.text import TEXT, TextRecipe

RECIPES: dict[str, ImageRecipe | TextRecipe] = {
    recipe.name: recipe for recipe in (DIGITS, DIGITS_LINEAR, MNIST_RECIPE, TEXT)
}


def recipe_named(name: str) -> Recipe:
    """What makes the task called ``name``: one of ours, or ``module:function`` or ``file.py:function``.

    Raises:
        TaskError: there is none; names the nearest, or all.
    """
    if ":" in name:
        return FunctionRecipe(name)
    if name not in RECIPES:
        hint = nearest(name, RECIPES) or f"; known tasks: {', '.join(RECIPES)}"
        own = (
            "" if hint.startswith("; did") else ", or write module:function or file.py:function for your own"
        )
        raise TaskError(f"no task {name!r}{hint}{own}")
    return RECIPES[name]
