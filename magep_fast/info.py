"""python -m magep_fast.info: what is built, what will run, and why not."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import magep_fast
from magep_fast.ops.backends import ENVIRONMENT_VARIABLE, backends, choose_backend
from magep_fast.ops.cuda import architectures, mismatch
from magep_fast.ops.library import instruction_set, missing_library, native_module


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cuda_kernels() -> str:
    """What the CUDA kernels were compiled for, and whether the GPU present can run that."""
    compiled = architectures()
    if not compiled:
        return "not built"
    text = f"compiled for {', '.join(f'sm_{name}' for name in compiled)}"
    if torch.cuda.is_available():
        text += f"; {mismatch(torch.cuda.get_device_capability(), compiled) or 'this GPU can run them'}"
    return text


def _choice(device: torch.device, dtype: torch.dtype) -> str:
    """The backend that "auto" takes and, on a GPU, why those made for it do not."""
    chosen = choose_backend("auto", device, dtype).name
    reasons = [
        f"{backend.name}: {reason}"
        for backend in backends()
        if device.type != "cpu" and chosen == "torch" and backend.name not in ("cpu", "reference", "torch")
        if (reason := backend.missing() or backend.unsupported(device, dtype)) is not None
    ]
    line = f"{str(dtype).removeprefix('torch.'):<9} {chosen}"
    return f"{line} ({'; '.join(reasons)})" if reasons else line


def report() -> str:
    """The report as text."""
    native = native_module()
    lines = [
        f"magep-fast    {magep_fast.__version__}",
        f"python        {platform.python_version()} on {platform.platform()}",
        f"torch         {torch.__version__}, {torch.get_num_threads()} threads",
        f"triton        {_version('triton')}",
        f"GPU           {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none visible to torch'}",
    ]
    if native is None:
        lines.append("native build  none")
    else:
        lines.append(f"native build  {native.version}, {native.build_type}, {native.compiler}")
        lines.append(f"              built against torch {native.torch_version}, for torch >= 2.10")
        features = native.cpu_features()
        lines.append(
            f"CPU features  {', '.join(name for name, present in features.items() if present) or 'none known'}"
        )
    reason = missing_library()
    loaded = f"loaded, CPU kernels: {instruction_set()}" if reason is None else f"missing: {reason}"
    lines.append(f"native ops    {loaded}")
    lines.append(f"CUDA kernels  {_cuda_kernels()}")
    lines.append("backends")
    for backend in backends():
        missing = backend.missing()
        lines.append(f"  {backend.name:<11} {'available' if missing is None else 'missing: ' + missing}")
    variable = os.environ.get(ENVIRONMENT_VARIABLE)
    lines.append(f"{ENVIRONMENT_VARIABLE} is {variable or 'not set'}")
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            lines.append(f"auto on {device}, {_choice(torch.device(device), dtype)}")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m magep_fast.info", description=__doc__).parse_args()
    print(report())
