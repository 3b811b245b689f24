"""Packs of compiled kernels: building one, using it where TileLang cannot be imported, faults of packs and of the command.

The driver of these tests is tests/native/fake_cuda.c, which prints the calls of a launch.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tl_attention import __version__
from tl_attention.compilation import building, compiler, manifest, pack, packing, store, toolkit
from tl_attention.config import configs, legality
from tl_attention.config.buckets import buckets
from tl_attention.config.kernel_configs import (
    BwdSum,
    DecodeCombine,
    FwdCombine,
)
from tl_attention.problem.attn_problem import (
    DEFAULT_DTYPE,
    DIRECTIONS,
    DTYPES,
    HALF_DTYPES,
    AttnProblem,
    tile_widths,
)
from tl_attention.tools import cli, doctor
from tl_attention.tracing.trace import trace

pytestmark = pytest.mark.xdist_group("pack")  # one process builds the pack
ROOT = Path(__file__).parents[1]
VERSION = __version__
WORDS = "bf16", "d64", "full", "combine"
PROBLEM = AttnProblem("bfloat16", 64, 64, False)

# Two of the three kernels with these words: one with TMA, one with programmatic dependent launch
MAKE_PACK = """
from tl_attention.compilation import packing
from tl_attention.tools import cli
choose = packing.choose
packing.choose = lambda *asked: [kernel for kernel in choose(*asked) if not kernel[0].has("sink")]
"""
BLOCKED = "import sys; sys.modules['tilelang'] = None\n"
PREPARE = """
from tl_attention.compilation import building, pack, store
from tl_attention.config.kernel_configs import *
from tl_attention.problem.attn_problem import AttnProblem
problem = AttnProblem("bfloat16", 64, 64, False)
"""
# Calls of the two kinds of kernels, with tensors at addresses of no memory
CALLS = """
import ctypes
held = []

def tensor(address, sizes, code, bits):
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    words = (ctypes.c_int64 * (6 + 2 * len(sizes)))(
        address, 2, len(sizes) | code << 32 | bits << 40 | 1 << 48, 0, 0, 0, *sizes, *strides
    )
    words[3] = ctypes.addressof(words) + 48
    words[4] = words[3] + 8 * len(sizes)
    held.append(words)
    return ctypes.c_void_p(ctypes.addressof(words))

def floats(number, *sizes):
    return tensor(number << 32, sizes, 2, 32)

def call(kernel, letters, config):
    held.append(letters.encode())
    fake.fake_expect(held[-1], 0)
    out = tensor(5 << 32, (2, 130, 4, 64), 4, 16)
    if isinstance(config, FwdCombine):
        arguments = floats(1, 3, 2, 4, 130, 64), floats(2, 3, 2, 4, 130), out, floats(6, 2, 4, 130), 0.7
    else:
        merges, sink = tensor(3 << 32, (5, 8), 0, 32), floats(4, 1)
        arguments = floats(1, 8, 1, 64, 64), floats(2, 8, 1, 64), merges, out, floats(6, 2, 4, 130), 0.7, 4, sink
    for _ in range(2):
        kernel(*arguments)
"""


def run_python(code: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run code in a process that imports from some folders before this checkout."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def output_of(code: str, *paths: Path, **variables: str) -> str:
    done = run_python(code, *paths, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def wheel(cache, tmp_path_factory) -> Path:
    """A pack of a few kernels, made by the command."""
    if not toolkit.find_nvcc():
        pytest.skip(toolkit.NO_NVCC)
    out = tmp_path_factory.mktemp("dist")
    printed = output_of(
        MAKE_PACK + f"cli.main(['pack', *{WORDS}, '--out', {str(out)!r}])", TL_ATTENTION_CACHE_DIR=str(cache)
    )
    (path,) = out.iterdir()
    assert f"{path}, 0.0 MB: 2 kernels, " in printed
    return path


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder with the installed pack."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", folder, wheel], check=True)
    return folder


@pytest.fixture
def copied(site, tmp_path) -> Path:
    """A copy of the installed pack, to damage."""
    return shutil.copytree(site, tmp_path / "copied")


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """A fake driver and CUDA runtime."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = ROOT / "tests/native/fake_cuda.c"
    flags = ["-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *flags, source, "-o", path], check=True)
    return path


def test_pack_serves_without_tilelang(site):
    code = (
        BLOCKED
        + PREPARE
        + """
for config in (FwdCombine(), DecodeCombine()):
    kernel = building.compile_kernel(problem, config)
    try:
        kernel(1)
    except RuntimeError as error:
        print(error)
print(type(store.find(problem, FwdCombine())).__name__, [name for name in sys.modules if name.startswith("tilelang.")])
"""
    )
    first, second, last = output_of(code, site).splitlines()
    assert first == "flash_fwd_combine_kernel: num_args should be 5; expected: 1, got: 5"
    assert second.startswith("flash_decode_combine_kernel: num_args should be 8")
    assert last == "PackedKernel []"


def test_pack_launches_as_tilelang_does(site, cache, driver):
    common = f"import ctypes; fake = ctypes.CDLL({str(driver)!r}, ctypes.RTLD_GLOBAL)\n" + PREPARE + CALLS
    packed = (
        BLOCKED
        + common
        + """
for config in (FwdCombine(), DecodeCombine()):
    found = store.find(problem, config)
    call(store.load(found), found.read()[0]["parameters"], config)
"""
    )
    compiled = (
        common
        + """
from tl_attention.compilation import packing
for config in (FwdCombine(), DecodeCombine()):
    path = store.kernel_path(problem, config)
    call(store.load(path), packing.record_of(path.read_bytes()).parameters, config)
"""
    )
    ours = output_of(packed, site)
    theirs = output_of(compiled, TL_ATTENTION_CACHE_DIR=str(cache))
    assert ours == theirs
    for text in (
        "map type 9 address 0x500000000",
        "attribute 8",
        "launch grid",
        "launch with 1 attributes, first 6 1,",
    ):
        assert text in ours


def test_pack_launch_errors_name_kernel_and_call(site, driver):
    code = (
        BLOCKED
        + "import ctypes; fake = ctypes.CDLL("
        + repr(str(driver))
        + ", ctypes.RTLD_GLOBAL)\n"
        + PREPARE
        + CALLS
        + """
found = store.find(problem, FwdCombine())
kernel = store.load(found)
fake_expect, fake.fake_expect = fake.fake_expect, lambda letters, status: fake_expect(letters, 700)
try:
    call(kernel, found.read()[0]["parameters"], FwdCombine())
except RuntimeError as error:
    print(error)
"""
    )
    (error,) = [line for line in output_of(code, site).splitlines() if "launch failed" in line]
    assert "flash_fwd_combine_kernel_kernel, grid 264 x 1 x 1, CTA 128 x 1 x 1, 2560 bytes" in error
    assert "launch failed with CUDA_ERROR_FAKE (700)" in error


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a driver")
def test_pack_kernel_without_driver_says_so(site):
    code = (
        BLOCKED
        + PREPARE
        + CALLS
        + """
class fake:
    fake_expect = lambda *arguments: None
found = store.find(problem, FwdCombine())
call(store.load(found), "", FwdCombine())
"""
    )
    assert "needs a GPU and its driver, and libcuda.so.1 could not be opened" in run_python(code, site).stderr


def use_pack(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Use the pack installed in a folder in this process, as if TileLang were not there."""
    monkeypatch.setattr(pack, "installed", lambda: pack.Pack.read(folder / pack.PACKAGE))
    monkeypatch.setattr(toolkit, "tilelang_version", lambda: None)


def doctor_lines(capsys: pytest.CaptureFixture) -> dict[str, str]:
    """Lines of the doctor, by the name of the check."""
    cli.main(["doctor"])
    return {line[8:].split()[0]: line for line in capsys.readouterr().out.splitlines()}


def test_pack_is_ignored_on_request(monkeypatch):
    monkeypatch.setattr(toolkit, "tilelang_version", lambda: None)
    monkeypatch.setenv("TL_ATTENTION_PACK", "0")
    assert pack.ignored()
    with pytest.raises(
        RuntimeError, match="TL_ATTENTION_PACK=0 ignores the pack of kernels; TileLang, which"
    ):
        store.kernel_path(PROBLEM, FwdCombine())


def test_pack_miss_says_what_brings_the_kernel(site, monkeypatch):
    monkeypatch.setattr(toolkit, "tilelang_version", lambda: None)
    monkeypatch.setattr(pack, "installed", lambda: None)
    with pytest.raises(RuntimeError, match=r"no pack of kernels .*; TileLang, which compiles") as caught:
        store.find(PROBLEM, BwdSum())
    assert "pip install 'tl-attention[kernels]'" in str(caught.value)
    page = (Path(__file__).parents[1] / "docs" / "install.md").read_text()
    assert str(caught.value) in " ".join(page.split()), "docs/install.md shows this error"
    assert all(words in page for words in (toolkit.NO_TILELANG, toolkit.NO_NVCC)), "and lines of the doctor"
    use_pack(monkeypatch, site)
    with pytest.raises(RuntimeError) as caught:
        store.find(PROBLEM, BwdSum())
    assert str(caught.value) == (
        "tl_attention: bf16 d64 full, sum 16 is not compiled; tl-attention-kernels"
        f" {VERSION}+{pack.sources_version()} does not have it; TileLang, which compiles kernels, is not installed:"
        " pip install 'tl-attention[jit]'"
    )


def test_pack_of_other_sources_is_not_used(copied, monkeypatch, capsys):
    path = copied / pack.PACKAGE / pack.INDEX
    index = json.loads(path.read_text())
    index["version"] = "0.0.9+0123456789ab"
    index["kernels"] = {f"{name[:-4]}0000": place for name, place in index["kernels"].items()}
    path.write_text(json.dumps(index))
    use_pack(monkeypatch, copied)
    words = (
        r"tl-attention-kernels 0\.0\.9\+0123456789ab is of other sources than those of this package .*"
        "build it with `tl-attention pack`"
    )
    with pytest.raises(RuntimeError, match=words):
        store.find(PROBLEM, FwdCombine())
    line = doctor_lines(capsys)["pack"]
    assert (
        line.startswith("- ") and f"0.0.9+0123456789ab, 0 of {len(manifest.pack_kernels())} kernels" in line
    )


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (pack.INDEX, b"{", "index.json: JSONDecodeError"),
        (pack.INDEX, b"[]", "index.json: TypeError"),
        (pack.INDEX, b'{"format": 99}', "expected format 2, got 99"),
        (pack.data_name(), b"x" * 50_000, "in kernels.bin: LZMAError"),
        (pack.data_name(), None, "in kernels.bin: FileNotFoundError"),
        (pack.LAUNCHER, b"no library", "launcher.so: "),
    ],
)
def test_damaged_pack_says_so(copied, file, content, words, monkeypatch, capsys):
    path = copied / pack.PACKAGE / file
    path.unlink()
    if content:
        path.write_bytes(content)
    use_pack(monkeypatch, copied)
    with pytest.raises(RuntimeError) as caught:
        store.load(store.find(PROBLEM, FwdCombine()))
    text = str(caught.value)
    assert (
        text.startswith(f"tl_attention: the pack of kernels in {path.parent} is damaged: ") and words in text
    )
    assert text.endswith("reinstall tl-attention-kernels, or set TL_ATTENTION_PACK=0 to do without it")
    if file == pack.INDEX:
        assert words in doctor_lines(capsys)["pack"]


def test_doctor_says_version_compilers_and_coverage(site, wheel):
    printed = output_of(BLOCKED + "from tl_attention.tools import cli; cli.main(['doctor'])", site)
    states = {line[8:21].strip(): (line[:8].strip(), line[21:]) for line in printed.splitlines()}
    state, text = states["pack"]
    assert state == "partial"
    whole = len(manifest.pack_kernels())
    assert text.startswith(
        f"{VERSION}+{pack.sources_version()}, 2 of {whole} kernels, by tilelang 0.1.15, nvcc "
    )
    assert f": the other {whole - 2} are compiled on a first call, by TileLang and nvcc; " in text
    assert text.endswith(pack.REMEDY)
    assert states["tilelang"][0] == "MISSING"  # for the kernels that the pack has not


@pytest.mark.parametrize("covered", [12, 13])
def test_doctor_says_ok_for_a_whole_pack_alone(covered, monkeypatch, capsys):
    installed = pack.Pack(Path("site"), "0.1.0", {}, [], {})
    monkeypatch.setattr(pack, "installed", lambda: installed)
    monkeypatch.setattr(doctor, "_pack_coverage", lambda: (covered, 13))
    state = "ok" if covered == 13 else "partial"
    assert doctor_lines(capsys)["pack"].startswith(f"{state:8}pack         0.1.0, {covered} of 13 kernels")


def test_doctor_asks_for_tilelang_without_a_pack(monkeypatch, capsys):
    monkeypatch.setattr(toolkit, "tilelang_version", lambda: None)
    monkeypatch.setattr(pack, "installed", lambda: None)
    lines = doctor_lines(capsys)
    assert lines["tilelang"].startswith("MISSING ")
    assert "pip install 'tl-attention[jit]'" in lines["nvcc"]
    assert "no pack of kernels (tl-attention-kernels) is installed" in lines["pack"]


def test_other_tilelang_does_not_compile(monkeypatch):
    monkeypatch.setattr(toolkit.importlib.metadata, "version", lambda name: "0.1.12")
    with pytest.raises(RuntimeError, match=r"TileLang 0\.1\.12 is installed, expected 0\.1\.15: pip install"):
        building.compile_kernel(PROBLEM, FwdCombine())
    assert toolkit.find_nvcc() is None


def test_wheel_is_reproducible_and_for_old_systems(wheel, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(cache))
    kernels = [(PROBLEM, FwdCombine()), (PROBLEM, DecodeCombine())]
    said = []
    monkeypatch.setattr(packing, "SAY_EVERY", 1)
    (again,) = packing.build(kernels, tmp_path, say=said.append)
    assert said[-1] == "2/2 kernels compressed"
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()
    assert wheel.name == f"tl_attention_kernels-{VERSION}-py3-none-manylinux_2_17_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        index = json.loads(archive.read(f"{pack.PACKAGE}/{pack.INDEX}"))
    assert sorted(index["kernels"]) == sorted(pack.key(*kernel) for kernel in kernels)


def test_large_pack_has_a_wheel_per_head_dim(tmp_path, monkeypatch):
    def record(path):
        return packing.Record("", "", "", False, path.name.encode() + os.urandom(3000), b"")

    chosen = packing.choose(manifest.pack_kernels().values(), ("combine",))
    widths = sorted({problem.head_dim for problem, _ in chosen})
    monkeypatch.setattr(packing, "_build_all", lambda *_: None)
    monkeypatch.setattr(packing, "local_bytes", lambda cubin: 0)
    monkeypatch.setattr(packing, "_read_record", record)
    monkeypatch.setattr(packing, "build_launcher", lambda target: target.write_bytes(b""))
    monkeypatch.setattr(store, "kernel_path", lambda problem, config: Path(f"{problem} {config}"))
    monkeypatch.setattr(packing, "MAX_BYTES", 3100 * len(chosen) // 2)
    first, *parts = packing.build(chosen, tmp_path, say=lambda line: None)
    assert [path.name.split("-")[0] for path in parts] == [
        f"tl_attention_kernels_d{width}" for width in widths
    ]
    site = tmp_path / "site"
    for path in (first, *parts):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    metadata = (site / f"tl_attention_kernels-{VERSION}.dist-info/METADATA").read_text()
    required = [line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    parts_required = [f"tl-attention-kernels-d{width}=={VERSION}" for width in widths]
    assert required == [f"tl-attention=={VERSION}", *parts_required]
    installed = pack.Pack.read(site / pack.PACKAGE)
    for problem, config in chosen:
        _, host, _ = installed.find(problem, config).read()
        assert host.startswith(f"{problem} {config}".encode())
    installed = pack.Pack.read(shutil.copytree(site / pack.PACKAGE, tmp_path / "without_a_part"))
    (installed.folder / pack.data_name(widths[0])).unlink()
    with pytest.raises(RuntimeError, match=f"kernels-d{widths[0]}.bin: FileNotFoundError"):
        installed.find(*next(kernel for kernel in chosen if kernel[0].head_dim == widths[0])).read()
    monkeypatch.setattr(packing, "MAX_BYTES", 1000)
    with pytest.raises(packing.PackError, match="of kernels per head dim, got .*shorten"):
        packing.build(chosen, tmp_path, say=lambda line: None)


def test_cubin_of_a_pack_keeps_all_but_debug_sections(wheel, cache, monkeypatch):
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(cache))
    library = store.kernel_path(PROBLEM, DecodeCombine()).read_bytes()
    start = library.index(b"\x7fELF", 1)
    record = packing.record_of(library)
    whole = library[start : start + len(record.cubin)]
    sections = packing.sections(whole)
    assert packing.sections(record.cubin).keys() == sections.keys()
    headers = range(
        *(lambda places: (min(places), max(places) + 64))([place for place, _, _ in sections.values()])
    )
    dropped = {
        byte
        for name, (_, offset, size) in sections.items()
        if name.removeprefix(".rela").lstrip(".") in packing.DEBUG_SECTIONS
        for byte in range(offset, offset + size)
    }
    changed = {i for i, (old, new) in enumerate(zip(whole, record.cubin, strict=True)) if old != new}
    assert changed <= dropped | set(headers)
    text = next(name for name in sections if name.startswith(".text"))
    assert packing.sections(record.cubin)[text] == sections[text]


SPILLING_CODE = """
extern "C" __global__ void __maxnreg__(24) kernel(float *x) {
  float held[48];
#pragma unroll
  for (int i = 0; i < 48; ++i) held[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 48; ++i) x[i * 32 + threadIdx.x] = held[47 - i] * held[i * 7 % 48];
}
"""


def test_pack_says_which_kernels_spill(wheel, cache, tmp_path, monkeypatch):
    spilling, known, good = (PROBLEM, FwdCombine()), (PROBLEM, BwdSum(64)), (PROBLEM, DecodeCombine())
    cubin = compiler.assemble(SPILLING_CODE, tmp_path, {})[1].read_bytes()
    size = packing.local_bytes(cubin)
    assert size >= 4 * 20 and packing.local_bytes(packing.without_debug(cubin)) == size
    fault = ("spill_bytes: expected 0, got 4",)
    monkeypatch.setattr(manifest, "KNOWN_FAULTS", {manifest.kernel_name(*known): fault})
    name = manifest.kernel_name(*spilling)
    expected = (
        f"1 kernel spills to local memory, which costs time and is no known fault: {name} ({size} bytes"
    )
    assert packing.spill_line({spilling: size, known: 8, good: 0}).startswith(expected)
    assert packing.spill_line({known: 8, good: 0}) is None

    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(cache))
    said = []
    packing.build([good], tmp_path, 1, said.append)
    assert not any("spill" in line for line in said)
    monkeypatch.setattr(packing, "local_bytes", lambda cubin: size)
    packing.build([good], tmp_path, 1, said.append)
    assert said[-1].startswith("1 kernel spills to local memory") and manifest.kernel_name(*good) in said[-1]


def test_foreign_library_is_refused(driver):
    with pytest.raises(
        packing.PackError, match="no symbol __tvm_ffi__library_bin; expected a library of TileLang"
    ):
        packing.record_of(driver.read_bytes())
    with pytest.raises(packing.PackError, match="expected a shared library"):
        packing.record_of(b"a text")


def test_damaged_cache_is_named(wheel, cache, tmp_path, monkeypatch):
    folder = shutil.copytree(cache, tmp_path / "cache")
    monkeypatch.setenv("TL_ATTENTION_CACHE_DIR", str(folder))
    path = store.kernel_path(PROBLEM, FwdCombine())
    for content in (b"", path.read_bytes()[:20_000]):
        path.write_bytes(content)
        with pytest.raises(
            packing.PackError, match=f"{path.name}: .*; delete the file, and it is built anew"
        ):
            packing.build([(PROBLEM, FwdCombine())], tmp_path, say=lambda line: None)


def pack_problems() -> Iterator[tuple[str, AttnProblem]]:
    """Direction and problem of each option alone, of one dtype."""
    for direction, option in itertools.product(
        DIRECTIONS[:2], ("window", "softcap", "alibi", "sink", "dropout", "varlen")
    ):
        if direction == "bwd" and option == "sink":  # its backward is that without it
            continue
        for width, causal in itertools.product(tile_widths(direction, with_options=True), (False, True)):
            if not (causal and option == "window"):
                yield direction, AttnProblem("float16", *width, causal, (option,))


def test_pack_has_shipped_kernels_and_each_option():
    kernels = set(manifest.pack_kernels().values())
    assert kernels >= set(manifest.shipped().values())
    for direction, problem in pack_problems():
        for bucket in buckets(direction):
            config = configs.option_config(problem, bucket, direction)
            if legality.fault(problem, config, direction) is None:
                assert kernels >= set(config.kernels(problem)), f"{direction} {problem} {bucket}"
    assert {problem.dtype for problem, _ in kernels} == set(DTYPES)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pack_has_the_kernels_of_a_block_mask(direction):
    documents, reach = torch.zeros(64, dtype=torch.int32), 100

    def mask_mod(b, h, q, k):
        return (documents[q] == documents[k]) & (q - k < reach)

    program, _, _ = trace(None, mask_mod, True).program.with_bits
    program = program.forward if direction == "fwd" else program.as_exact
    kernels, shipped = set(manifest.pack_kernels().values()), set(manifest.shipped().values())
    for dtype, width in itertools.product(HALF_DTYPES, tile_widths(direction)):
        problem = AttnProblem.of(dtype, *width, False, direction, program=program)
        for bucket in buckets(direction):
            config, _ = configs.pick_config(problem, bucket, "NVIDIA H100 80GB HBM3", direction)
            assert legality.fault(problem, config, direction) is None
            needed = set(config.kernels(problem))
            assert kernels >= needed, f"{problem} {bucket}"
            assert dtype != DEFAULT_DTYPE or shipped >= needed, f"{problem} {bucket}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["bf16", "d65"],
            "no kernel has all of the words 'bf16 d65'; `tl-attention pack --list` prints the kernels",
        ),
        (["combine", "--out", "{file}/dist"], "--out: expected a folder that can be written, got"),
    ],
)
def test_pack_command_says_what_is_wrong(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: ("nvcc", "PATH"))
    (tmp_path / "file").touch()
    assert cli.main(["pack", *(word.format(file=tmp_path / "file") for word in arguments)]) == 2
    assert words in capsys.readouterr().out


def test_pack_command_needs_tilelang_nvcc_and_a_compiler(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: None)
    assert cli.main(["pack", "combine", "--out", str(tmp_path)]) == 2
    assert toolkit.NO_NVCC in capsys.readouterr().out
    monkeypatch.setattr(toolkit, "tilelang_version", lambda: None)
    assert cli.main(["pack", "combine", "--out", str(tmp_path)]) == 2
    assert toolkit.NO_TILELANG in capsys.readouterr().out
    monkeypatch.setattr("tilelang.contrib.cc.get_cplus_compiler", lambda: "no-such-compiler")
    with pytest.raises(
        packing.PackError, match="no-such-compiler does not run .*; install g\\+\\+ or set CXX"
    ):
        packing.build_launcher(tmp_path / "launcher.so")


def test_pack_command_reports_kernels_that_fail(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: ("nvcc", "PATH"))
    failing = lambda kernels, jobs, say: dict.fromkeys(kernels, RuntimeError("nvcc: spilled"))  # noqa: E731
    monkeypatch.setattr(building, "build_all", failing)
    assert cli.main(["pack", *WORDS, "--out", str(tmp_path)]) == 1
    assert "nvcc: spilled\n3 of 3 kernels could not be built" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_pack_command_lists_kernels(capsys):
    assert cli.main(["pack", *WORDS, "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "bf16 d64 full sink, decode combine 4x8",
        "bf16 d64 full, combine 4",
        "bf16 d64 full, decode combine 4x8",
    ]


@pytest.mark.gpu
def test_pack_gives_the_bits_of_compiled_kernels(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/pack.py"), "check", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 of 40 problems have the bits" in done.stdout
