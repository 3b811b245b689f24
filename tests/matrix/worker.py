"""Worker of the matrix: runs classes that it reads from stdin, and writes a line to the parent before each launch."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from .calls import Trial, trial_of
from .classes import CallClass
from .draws import draws
from .memory import Arena, bits, count_launches, forget_plans, replace_everywhere

REPEATS = 6
MAX_TEXT = 400  # characters of a fault

Say = Callable[..., None]


def run_class(
    one: CallClass, seed: int, indices: list[int] | None, arena: Arena, counts: Counter[str], say: Say
) -> None:
    """Run draws of a class and say how they ended. A fault of a draw does not stop the others, an error of CUDA does."""
    begin, failures = time.monotonic(), []
    launches: Counter[str] = Counter()  # draws that launch a kernel
    chosen = [draw for draw in draws(one, seed) if indices is None or draw.index in indices]
    forget_plans()
    for draw in chosen:
        say("at", draw=draw.index, text=str(draw))
        counts.clear()
        try:
            faults = faults_of_draw(trial_of(one, draw, arena.device), arena)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            faults = [f"{type(error).__name__}: {error} ({last.filename.rpartition('/')[2]}:{last.lineno})"]
            if is_lost():
                failures.append((draw.index, str(draw), "; ".join(faults)[:MAX_TEXT]))
                seconds = time.monotonic() - begin
                say("end", failures=failures, draws=len(chosen), launches={}, seconds=seconds, lost=True)
                os._exit(1)
        launches.update(counts.keys())
        if faults:
            failures.append((draw.index, str(draw), "; ".join(faults)[:MAX_TEXT]))
    seconds = time.monotonic() - begin
    say("end", failures=failures, draws=len(chosen), launches=dict(launches), seconds=seconds)


def faults_of_draw(trial: Trial, arena: Arena) -> list[str]:
    """Run a call REPEATS times. Returns what is wrong with its bits, its canaries and its first outputs."""
    arena.reset()
    first = trial.run()
    promised = [bits(x) for x in trial.repeats(first)]
    changed = torch.zeros((), dtype=torch.bool, device=arena.device)
    for _ in range(REPEATS - 1):
        again = trial.repeats(trial.run())
        for x, y in zip(promised, again, strict=True):
            changed |= (x != bits(y)).any()
    damaged, changed = torch.stack([arena.damaged(), changed]).tolist()
    faults = trial.faults(first)
    if damaged:
        faults.insert(0, "memory beside an output or a workspace was written")
    if changed:
        faults.insert(0, f"bits change in {REPEATS} runs")
    return faults


def is_lost() -> bool:
    """True if CUDA does not work in this process any more, as after an access to memory that is not there."""
    try:
        torch.cuda.synchronize()
        return torch.zeros(1, device="cuda").item() != 0
    except Exception:
        return True


def line_to_parent() -> Callable[..., None]:
    """say(kind, **values): a line of JSON on stdout. What libraries print goes to the log from then on."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(kind: str, **values: Any) -> None:
        channel.write(json.dumps({"kind": kind, **values}) + "\n")
        channel.flush()

    return say


def main(device: str | None = None) -> None:
    """Run classes by their ids in lines of JSON, until stdin ends. device: None: the current GPU."""
    say = line_to_parent()
    from .classes import pack_classes

    torch.set_num_threads(1)
    gpu = "no GPU" if device else torch.cuda.get_device_name()
    device = device or f"cuda:{torch.cuda.current_device()}"
    arena, counts = Arena(device), Counter()
    replace_everywhere("empty", arena.empty)
    count_launches(counts)
    classes = {one.id: one for one in pack_classes()}
    torch.randn(64, 64, device=device).matmul(torch.randn(64, 64, device=device)).sum().item()
    say("ready", gpu=gpu)
    for line in sys.stdin:
        asked = json.loads(line)
        run_class(classes[asked["id"]], asked["seed"], asked["draws"], arena, counts, say)
