"""The hash of the manifest: a fault in one line of a kernel changes the hashes of the kernels that have it; names and bound values do not.

Edits are made in a copy of the folder of kernels, from which a few kernels are traced: one of a forward, of a backward and of a
decode at a time, as their files differ and each copy is parsed anew.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import tl_attention
from tl_attention.compilation import manifest

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("tilelang"), reason="needs tilelang"),
    pytest.mark.timeout(600),
]
PACKAGE = "tl_attention.kernels"
FOLDER = Path(tl_attention.__file__).with_name("kernels")
SHIPPED = manifest.shipped()
STREAM_K = "bf16 d128 causal, 128x128 stream-K q2"  # no ping-pong, so no turns
FORWARD = ("bf16 d128 causal, 128x128 dynamic q2 ping-pong hold-max", STREAM_K)
APART = "bf16 d64 causal, dq+dk+dv 64x128x4x4 apart stream-K"  # a warpgroup of its own computes dq
WITH_DQ = "bf16 d64 full window, dq+dk+dv 128x128x2x2 reuse separate-dS dynamic-late"
KEYS_ALONE = "bf16 d64 causal, dk+dv 96x128x2x2"
BACKWARD = (WITH_DQ, APART, KEYS_ALONE)
BESIDE = "bf16 d128 full window, decode 2x128x2x1"  # S of a block beside P V of the one before
IN_TURN = "bf16 d128 full window, decode 1x64x2x2"
DECODE = (BESIDE, IN_TURN)


@dataclass(frozen=True)
class Edit:
    """A change of the text of the kernels.

    Args:
        old: pattern, in one place of one file.
        new: what replaces it; \\1, .. are the groups of the pattern.
        kernels: names of the kernels that are traced.
        same: those of them that have the same hash.
    """

    old: str
    new: str
    kernels: tuple[str, ...]
    same: tuple[str, ...] = ()


FAULTS = {
    "forward: K is released before S is complete": Edit(
        r"( +T\.wait_wgmma\(len\(products\)\).*\n)( +smem\.K\.release\(.*\n)", r"\2\1", FORWARD
    ),
    "forward: the turn is passed on before P V is issued": Edit(
        r"( +output\.start\(.* - 1\)\n)( +ping_pong\.pass_on\(w\)\n)", r"\2\1", FORWARD, same=(STREAM_K,)
    ),
    "forward: V of another slot": Edit(
        r"(output\.start\(P_terms, smem\.V, .*) - 1\)", r"\1)", FORWARD
    ),
    "forward: O is rescaled before P is rounded": Edit(
        r"( +round_P\(acc_s, P_terms, dropout\)\n)((?: +#.*\n)? +if .*update.*:\n +softmax\.rescale\(.*\n)",
        r"\2\1",
        FORWARD,
    ),
    "backward: dS is written before its slot is free": Edit(
        r"( +dS\.wait_empty\(step\)\n)( +dS\.write\(.*\n)", r"\2\1", BACKWARD, same=(KEYS_ALONE,)
    ),
    "backward: no fence between dS and the product that reads it": Edit(
        r"(def announce\(self, step\):\n.*\n +)T\.fence_proxy_async\(\)\n +", r"\1", BACKWARD, same=(KEYS_ALONE,)
    ),
    "backward: dq from dS of another slot": Edit(
        r"(self\.multiply\(step) \+ 1,", r"\1,", BACKWARD, same=(APART, KEYS_ALONE)
    ),
    "backward: dO is released before dV is complete": Edit(
        r"(?s)(def dq_apart_own_registers\(.*?)( +step\.wait_all_but\(\"dK\", \"S\"\)[^\n]*\n)( +smem\.dO\.release\(i\)\n)",
        r"\1\3\2",
        BACKWARD,
        same=(WITH_DQ, KEYS_ALONE),
    ),
    "decode: K is released before S is complete": Edit(
        r"( +T\.wait_wgmma\(1\).*\n)( +smem\.K\.release\(.*\n)", r"\2\1", DECODE, same=(IN_TURN,)
    ),
    "decode: V of another slot": Edit(
        r"(T\.wgmma_gemm\(me\.P, smem\.V\[me\.segment\.step\[0\])\]", r"\1 + 1]", DECODE
    ),
    "decode: no fence between queries and the product that reads them": Edit(
        r"(sign, dtype_of\(\"q\"\)\n +\)\n) +T\.fence_proxy_async\(\)\n", r"\1", DECODE
    ),
    "decode: O is rescaled before P is rounded": Edit(
        r"( +T\.copy\(me\.acc_s, me\.P\)\n)( +me\.softmax\.rescale\(.*\n)( +segment\.step)", r"\2\1\3", DECODE, same=(IN_TURN,)
    ),
}  # fmt: skip
REFACTORINGS = {
    "forward: another name": Edit(r"\bacc_pv\b", "product", FORWARD),
    "forward: a bound value": Edit(
        r"( +)output\.finish\(P_terms, smem\.V, (.*) - 1\)",
        r"\1one_later = \2\n\1output.finish(P_terms, smem.V, one_later - 1)",
        FORWARD,
    ),
    "forward: helpers in another order": Edit(
        r"( +ping_pong = PingPong\(.*\n)( +skips_first_steps = .*\n)", r"\2\1", FORWARD
    ),
    "backward: another name": Edit(r"\bdS_address\b", "thread_address", BACKWARD),
    "backward: a bound value": Edit(
        r"( +)key = tile\.first_key \+ 64 \* w\n( +scores = )",
        r"\1tile_key = tile.first_key\n\1key = tile_key + w * 64\n\2",
        BACKWARD,
    ),
    "decode: another name and a bound value": Edit(
        r"( +)weigh\(me, block_start\(segment, i\), segment",
        r"\1first = block_start(segment, i)\n\1weigh(me, first, segment",
        DECODE,
    ),
}


def edited(edit: Edit, folder: Path) -> str:
    """Make an edit in a folder; returns the folder of its file. Raises LookupError if no file, or more than one, has the text."""
    places = {path: text for path in folder.rglob("*.py") if re.search(edit.old, text := path.read_text())}
    if len(places) != 1:
        names = sorted(path.name for path in places)
        raise LookupError(f"{edit.old}: expected in one file of kernels/, got {names}; name today's line")
    ((path, text),) = places.items()
    path.write_text(re.sub(edit.old, edit.new, text))
    return path.relative_to(folder).parts[0]


def groups(edits: dict[str, Edit]) -> list[tuple[str, ...]]:
    """Names of edits: the first of each pass, the second of each, and so on."""
    by_pass = [[name for name in edits if name.startswith(x)] for x in ("forward", "backward", "decode")]
    return [tuple(filter(None, names)) for names in itertools.zip_longest(*by_pass)]


@pytest.fixture
def hashes_of(tmp_path, monkeypatch):
    """Function of edits: hash per kernel of each, traced from a copy of the kernels with them."""

    def find(*edits: Edit) -> list[dict[str, str]]:
        copy = shutil.copytree(FOLDER, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        assert len({edited(edit, copy) for edit in edits}) == len(edits), (
            "no edit changes the kernels of another"
        )
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
            monkeypatch.delitem(sys.modules, name)
        spec = importlib.util.spec_from_file_location(
            PACKAGE, copy / "__init__.py", submodule_search_locations=[str(copy)]
        )
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        monkeypatch.setattr(tl_attention, "kernels", package, raising=False)
        spec.loader.exec_module(package)
        return [{name: manifest.text_hash(*SHIPPED[name]) for name in edit.kernels} for edit in edits]

    importlib.import_module(PACKAGE)
    yield find
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


TEXTS = manifest.committed_texts()


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("names", groups(FAULTS), ids="; ".join)
def test_hash_sees_a_fault_of_one_line(names, hashes_of):
    for name, found in zip(names, hashes_of(*map(FAULTS.get, names)), strict=True):
        same = {kernel for kernel, text in found.items() if text == TEXTS[kernel]}
        assert same == {*FAULTS[name].same}, name


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("names", groups(REFACTORINGS), ids="; ".join)
def test_hash_is_blind_to_names_and_bound_values(names, hashes_of):
    for name, found in zip(names, hashes_of(*map(REFACTORINGS.get, names)), strict=True):
        assert found == {kernel: TEXTS[kernel] for kernel in found}, name
