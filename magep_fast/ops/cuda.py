"""The backend `cuda`: the operators of the backend `cpu`, with CUDA C++ kernels for CUDA tensors.

The kernels are in a library of their own, which a build with nvcc makes and which is loaded at import where torch has a
CUDA device. One wheel so serves machines with and without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from magep_fast import factored
from magep_fast.ops import native
from magep_fast.ops.library import missing_library, native_module
from magep_fast.ops.operations import wrong_dtype
from magep_fast.terms import Table

_LIBRARY = Path(__file__).resolve().parent.parent / "libmagep_fast_cuda.so"

MOST_LAYERS = 32
"""Kernels take the pointers of a network's layers by value (csrc/cuda/shape.h)."""

SMALL_NETWORK = 2**14
"""Weights and biases of one network, in all channels, up to which launches decide and not arithmetic: "auto" gives
larger ones to `triton` if that can run. (Up to about here, all of a network fits into the shared memory of one block,
and the forward pass is one launch.)"""


def architectures() -> tuple[str, ...]:
    """What the kernels were compiled for, as CMake names it: "80" is machine code and PTX, "86-real" only machine
    code, "90-virtual" only PTX. Empty if they were not built."""
    return tuple(getattr(native_module(), "cuda_architectures", "").split())


def mismatch(capability: tuple[int, int], compiled: Sequence[str]) -> str | None:
    """Why a GPU of this compute capability cannot run what was compiled, or None.

    Machine code runs on later minor versions of the same major version, PTX is compiled for whatever is later.
    """
    for name in compiled:
        number, _, kind = name.partition("-")
        major, minor = divmod(int(number), 10)
        if kind != "virtual" and major == capability[0] and minor <= capability[1]:
            return None
        if kind != "real" and (major, minor) <= capability:
            return None
    found = "".join(map(str, capability))
    return (
        f"its kernels were compiled for {', '.join(f'sm_{name}' for name in compiled)}, this GPU is sm_{found}: build "
        f'with CMAKE_ARGS="-DMAGEP_CUDA_ARCHITECTURES={found}"'
    )


def _load() -> str | None:
    """Loads the library if it is there and of use; otherwise says why not."""
    if missing_library() is not None:
        return missing_library()
    if not architectures() or not _LIBRARY.exists():
        return (
            "its kernels were not built: install where nvcc is found and torch has CUDA, or with "
            'CMAKE_ARGS="-DMAGEP_WITH_CUDA=ON"'
        )
    # At import, so not is_available(): that starts CUDA, after which a forked process cannot use it. Counting
    # devices does not, where NVML answers.
    if torch.cuda.device_count() == 0:
        return "torch sees no CUDA device"
    try:
        torch.ops.load_library(_LIBRARY)
    except OSError as error:
        return f"{_LIBRARY.name} does not load with torch {torch.__version__}: {error}"
    return None


_missing = _load()


def missing() -> str | None:
    """Why the backend cannot run on this machine, or None. Found out once, at import, so that torch.compile sees a
    constant."""
    return _missing


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why tensors of this kind cannot be taken, or None."""
    if device.type != "cuda":
        return "it runs on CUDA tensors only"
    reason = wrong_dtype(dtype, native.DTYPES)
    if reason is not None or _missing is not None:
        return reason
    properties = torch.cuda.get_device_properties(device)
    return mismatch((properties.major, properties.minor), architectures())


def chain(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """As `factored.chain`."""
    if len(weights) > MOST_LAYERS:
        return factored.chain(weights, biases)
    return native.chain(weights, biases)


def equivariant(
    table: Table,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    matrices: Sequence[Tensor],
    psi: Tensor | None,
    activation: str | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """As `factored.equivariant`. The linear terms alone have no CUDA kernels."""
    if psi is None or len(weights) > MOST_LAYERS:
        return factored.equivariant(table, weights, biases, matrices, psi, activation)
    if table.share_Wb:
        table, matrices = factored.unshare_Wb(table, matrices)
    return native.equivariant(table, weights, biases, matrices, psi, activation)


def invariant(
    table: Table, weights: Sequence[Tensor], biases: Sequence[Tensor], matrix: Tensor, psi: Tensor | None
) -> Tensor:
    """As `factored.invariant`."""
    if len(weights) > MOST_LAYERS:
        return factored.invariant(table, weights, biases, matrix, psi)
    if table.share_Wb:
        table, (matrix,) = factored.unshare_Wb(table, [matrix])
    return native.invariant(table, weights, biases, matrix, psi)
