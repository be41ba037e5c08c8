"""The native libraries: loaded once, and the reason why if they cannot be."""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

_OPS = Path(__file__).resolve().parent.parent / "libmagep_fast_ops.so"


def missing_library() -> str | None:
    """None if the torch operators are there, or why they are not. Found out once, at import, so that torch.compile sees
    a constant."""
    return _missing


def load_library() -> None:
    """Loads the torch operators, or notes why that failed."""
    global _missing
    _missing = None
    if not _OPS.exists():
        source = _OPS.parent.parent
        _missing = (
            f"{source} is a source folder without a build, and hides an installed magep_fast: run from another folder, "
            "or build here with pip install --no-build-isolation -e ."
            if (source / "setup.py").exists()
            else "this installation has no native library: it was built without a C++ compiler or with "
            "MAGEP_FAST_NO_NATIVE=1; run pip install again with a compiler"
        )
        return
    try:
        torch.ops.load_library(_OPS)
    except OSError as error:
        _missing = f"{_OPS.name} does not load with torch {torch.__version__}: {error}"


_missing: str | None
load_library()


def instruction_set() -> str:
    """The level of the CPU kernels in use, or why there is none."""
    function = ctypes.CDLL(str(_OPS)).magep_fast_isa
    function.restype = ctypes.c_char_p
    return function().decode()


@cache
def native_module() -> ModuleType | None:
    """The module of build and CPU facts, or None."""
    try:
        return importlib.import_module("magep_fast._native")
    except ImportError:
        return None
