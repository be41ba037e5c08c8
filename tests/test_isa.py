import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import magep_fast
from magep_fast import MagepEquivariant, MagepInvariant, WeightSpace, use_backend
from magep_fast.ops.library import missing_library, native_module
from tests.helpers import Case, assert_same, gradients

if missing_library() is not None:
    pytest.skip(missing_library(), allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path(magep_fast.__file__).parent / "libmagep_fast_ops.so"
FEATURES = {"portable": (), "avx2": ("avx2", "fma"), "avx512": ("avx2", "fma", "avx512f")}


def is_supported(level):
    return all(native_module().cpu_features().get(feature, False) for feature in FEATURES[level])


def results(backend, dtype):
    """Outputs and gradients of both layers, with and without a single output."""
    tensors = []
    for kind in (MagepEquivariant, MagepInvariant):
        for widths in ((3, 17, 9, 2), (2, 33, 9, 1)):
            case = Case(WeightSpace(widths), 3, 5, 9, frozenset({"all"}), seed=0)
            features, layer = case.features(), case.layer(kind)
            with use_backend(backend):
                output, found = gradients(layer.to(dtype), features.to(dtype))
            outputs = (output,) if isinstance(output, torch.Tensor) else output.tensors()
            tensors += [x.detach() for x in (*outputs, *found)]
    return tensors


def run_with_level(level, path):
    code = (
        "import sys, torch; from tests.test_isa import results; "
        "torch.save([results('cpu', dtype) for dtype in (torch.float64, torch.float32)], sys.argv[1])"
    )
    environment = os.environ | {"MAGEP_FAST_ISA": level}
    return subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("level", FEATURES)
def test_every_level_agrees_with_the_reference(level, tmp_path):
    run = run_with_level(level, tmp_path / "results.pt")
    if not is_supported(level):
        assert run.returncode != 0
        assert f"RuntimeError: MAGEP_FAST_ISA={level} is not supported by this processor" in run.stderr
        return
    assert run.returncode == 0, run.stderr
    expected = results("reference", torch.float64)
    for found, tolerance in zip(torch.load(tmp_path / "results.pt"), (1e-10, 1e-5), strict=True):
        for x, y in zip(found, expected, strict=True):
            assert_same(x.double(), y, tolerance)


def test_unknown_level_is_an_error(tmp_path):
    run = run_with_level("sse9", tmp_path / "results.pt")
    assert run.returncode != 0
    assert "RuntimeError: MAGEP_FAST_ISA=sse9 is unknown; expected avx512, avx2 or portable" in run.stderr


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump (binutils) is not installed")
@pytest.mark.skipif("avx2" not in (native_module().cpu_features() if native_module() else {}), reason="x86-64 only")
def test_wide_registers_stay_inside_their_level():
    """Inline functions exist in the objects of every level and the linker keeps one of them: it must be one that runs
    on any processor."""
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    function, wide = "", {}
    for line in listing.splitlines():
        header = re.fullmatch(r"[0-9a-f]+ <(.*)>:", line)
        if header:
            function = header[1]
        elif found := re.search(r"%([yz])mm\d|%k[0-7]", line):
            wide.setdefault(function, found[0])
    levels = re.compile(r"magep::(avx2|avx512)::")
    assert any(levels.search(name) for name in wide)
    assert {name: register for name, register in wide.items() if not levels.search(name)} == {}
