import os
import subprocess
import sys

import pytest
import torch

import magep_fast
from magep_fast import info
from magep_fast.ops.backends import backends
from magep_fast.ops.library import missing_library, native_module


def test_report_names_versions_and_backends():
    run = subprocess.run([sys.executable, "-m", "magep_fast.info"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert ["magep-fast", magep_fast.__version__] in lines
    assert torch.__version__ in run.stdout
    for backend in backends():
        status = "available" if backend.missing() is None else "missing:"
        assert any(line[:2] == [backend.name, status] for line in lines)
    for dtype in ("float32", "float64", "bfloat16", "float16"):
        assert any(line[:4] == ["auto", "on", "cpu,", dtype] for line in lines)
    if native_module() is not None:
        assert native_module().compiler in run.stdout


@pytest.mark.skipif(missing_library() is not None, reason="no native library")
@pytest.mark.parametrize(("level", "shown"), [("portable", "portable"), ("mmx", "MAGEP_FAST_ISA=mmx is unknown")])
def test_report_names_the_instruction_set(level, shown):
    environment = os.environ | {"MAGEP_FAST_ISA": level}
    command = [sys.executable, "-m", "magep_fast.info"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    assert f"native ops    loaded, CPU kernels: {shown}" in run.stdout


def test_report_explains_what_is_missing(monkeypatch):
    monkeypatch.setattr(info, "missing_library", lambda: "it was left out")
    monkeypatch.setattr(info, "native_module", lambda: None)
    monkeypatch.setenv("MAGEP_FAST_BACKEND", "reference")
    report = info.report()
    assert "native build  none" in report
    assert "native ops    missing: it was left out" in report
    assert "MAGEP_FAST_BACKEND is reference" in report
