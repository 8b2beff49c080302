"""Small real training jobs, and the comparison of precisions on them."""

from floatplan.tasks.comparison import Comparison, Request, plan_comparison, run_comparison
from floatplan.tasks.registry import TASKS, task_named
from floatplan.tasks.rows import DEFAULT_ROWS, ROWS, Row, row_named
from floatplan.tasks.task import Data, DataSource, Examples, Task
from floatplan.tasks.train import Job, train

__all__ = [
    "DEFAULT_ROWS",
    "ROWS",
    "TASKS",
    "Comparison",
    "Data",
    "DataSource",
    "Examples",
    "Job",
    "Request",
    "Row",
    "Task",
    "plan_comparison",
    "row_named",
    "run_comparison",
    "task_named",
    "train",
]
