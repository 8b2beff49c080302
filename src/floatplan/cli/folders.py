"""Names of new run folders."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path


def new_folder(task: str) -> Path:
    """``runs/TASK-DATE-TIME``: no folders of the task's own name, and no signs that systems refuse."""
    name = re.sub(r"[^\w.-]+", "-", task.replace("\\", "/").rpartition("/")[2])
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
