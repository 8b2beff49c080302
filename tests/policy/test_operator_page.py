"""The page that lists the operators says what the table says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    script = ROOT / "scripts" / "operator_table.py"
    made = subprocess.run([sys.executable, script], capture_output=True, timeout=60, check=True).stdout
    assert (ROOT / "docs" / "operators.md").read_bytes() == made, f"run: python {script.relative_to(ROOT)}"
