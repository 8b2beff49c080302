"""Small real training jobs, and the comparison of precisions on them."""

from floatplan.tasks.comparison import Comparison, Request, plan_comparison, run_comparison
from floatplan.tasks.images import Data, Examples, ImageRecipe
from floatplan.tasks.registry import RECIPES, recipe_named
from floatplan.tasks.rows import DEFAULT_ROWS, ROWS, Row, row_named
from floatplan.tasks.task import DataSource, Ingredients, Recipe, Task
from floatplan.tasks.train import Job, train

__all__ = [
    "DEFAULT_ROWS",
    "RECIPES",
    "ROWS",
    "Comparison",
    "Data",
    "DataSource",
    "Examples",
    "ImageRecipe",
    "Ingredients",
    "Job",
    "Recipe",
    "Request",
    "Row",
    "Task",
    "plan_comparison",
    "recipe_named",
    "row_named",
    "run_comparison",
    "train",
]
