"""Facts beside a measured number: GPU, clocks, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch


def version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def facts(command: str) -> dict[str, str]:
    """GPU, limits, clocks, versions, commit and command, in words; absent ones say so."""
    known = {"gpu": "none", "power limit": "unknown", "clocks": "unknown", "driver": "unknown"}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        known["gpu"] = f"{properties.name}, {properties.multi_processor_count} SMs"
        known |= _nvidia_smi(str(getattr(properties, "uuid", "")))
    packages = ("torch", "triton", "tilelang", "flash-attn", "flash-attn-3", "flash-attn-4")
    return {
        **known,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version() or "none"),
        "python": platform.python_version(),
        **{package: version(package) or "not installed" for package in packages},
        "commit": git_commit(),
        "command": command,
    }


def _nvidia_smi(uuid: str) -> dict[str, str]:
    fields = "power.limit,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,driver_version"
    device = ["-i", f"GPU-{uuid}"] if uuid else []
    lines = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", *device])
    values = lines.split("\n")[0].split(", ")
    if len(values) != fields.count(",") + 1:
        return {}
    power, sm, sm_max, memory, temperature, driver = values
    clocks = f"SM {sm} (max {sm_max}), memory {memory}, {temperature} °C at the start"
    return {"power limit": power, "clocks": clocks, "driver": driver}


def git_commit() -> str:
    """Short hash of this package's checkout, with -dirty if tracked files differ; "unknown" without a checkout.

    TL_ATTENTION_COMMIT sets it for a copy without .git.
    """
    if told := os.environ.get("TL_ATTENTION_COMMIT"):
        return told
    root = Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(root)]
    if _output([*git, "rev-parse", "--show-toplevel"]) != str(
        root
    ):  # the package is installed inside another checkout
        return "unknown"
    commit = _output([*git, "rev-parse", "--short", "HEAD"])
    dirty = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}{'-dirty' if dirty else ''}" if commit else "unknown"


def _output(command: list[str]) -> str:
    """Standard output of a command; empty if it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
