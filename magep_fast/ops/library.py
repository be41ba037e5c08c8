"""The native libraries: loaded once, and the reason why if they cannot be."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

_OPS = Path(__file__).resolve().parent.parent / "libmagep_fast_ops.so"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def missing_library() -> str | None:
    """None if the torch operators are there, or why they are not."""
    return load_library()


@cache
def load_library() -> str | None:
    """Loads the torch operators; None, or why that failed."""
    if not _OPS.exists():
        return (
            "this installation has no native library: it was built without a C++ compiler or with "
            "MAGEP_FAST_NO_NATIVE=1; run pip install again with a compiler"
        )
    try:
        torch.ops.load_library(_OPS)
    except OSError as error:
        return f"{_OPS.name} does not load with torch {torch.__version__}: {error}"
    return None


@cache
def native_module() -> ModuleType | None:
    """The module of build and CPU facts, or None."""
    try:
        return importlib.import_module("magep_fast._native")
    except ImportError:
        return None
