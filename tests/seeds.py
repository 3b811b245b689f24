"""Seeds of samples that differ from run to run of CI."""

from __future__ import annotations

import datetime
import functools
import subprocess
from pathlib import Path


@functools.cache
def commit_seed() -> int:
    """Hash of the checked-out commit as a number, or the day where there is no git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return datetime.date.today().toordinal()
    return int(run.stdout, 16)
