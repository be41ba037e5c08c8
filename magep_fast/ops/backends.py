"""The backends, equal citizens behind one interface, and the choice among them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from magep_fast.ops.operations import DenseLayers, Layer, Operation
from magep_fast.spaces import WeightFeatures

AUTO = "auto"
ENVIRONMENT_VARIABLE = "MAGEP_FAST_BACKEND"


def _always(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of every operation.

    Args:
        chain: `(weights, biases) -> (prefixes, suffixes)`.
        equivariant: `(table, weights, biases, matrices, psi, activation) -> (weights, biases)`.
        invariant: `(table, weights, biases, matrix, psi) -> [B, out_features]`.
        missing: why the backend cannot run on this machine at all, or None.
        unsupported: why it cannot take tensors of this device and dtype, or None.
        stack_of: `(layers, dense, dtype) -> operation` that computes them one after another, or None if it has none.
        automatic: whether "auto" may choose it.
        hands_over: (name, size): "auto" gives networks of more than `size` numbers to that backend instead, where it
            can take them.
    """

    name: str
    chain: Callable[..., tuple[list[Tensor], list[Tensor]]]
    equivariant: Callable[..., tuple[list[Tensor], list[Tensor]]]
    invariant: Callable[..., Tensor]
    missing: Callable[[], str | None] = _always
    unsupported: Callable[[torch.device, torch.dtype], str | None] = _always
    stack_of: Callable[[Sequence[Layer], DenseLayers | None, torch.dtype], Operation | None] = _always
    automatic: bool = True
    hands_over: tuple[str, int] | None = None


_backends: dict[str, Backend] = {}
_forced: str | None = None


def register_backend(backend: Backend) -> None:
    """Adds a backend; "auto" prefers the one registered last."""
    _backends[backend.name] = backend


def backends() -> tuple[Backend, ...]:
    """Every registered backend, whether or not it can run here."""
    return tuple(_backends.values())


def available_backends() -> tuple[str, ...]:
    """The names of the backends that can run on this machine."""
    return tuple(backend.name for backend in _backends.values() if backend.missing() is None)


def check_backend(name: str) -> str:
    """The name itself, if it is "auto" or a backend that can run here; otherwise an error that says why not."""
    if name == AUTO:
        return name
    if name not in _backends:
        raise ValueError(f"unknown backend {name!r}; expected {AUTO!r} or one of {tuple(_backends)}")
    reason = _backends[name].missing()
    if reason is not None:
        raise RuntimeError(f"backend {name!r} cannot run here: {reason}. Available: {available_backends()}")
    return name


class use_backend:
    """Forces a backend for every layer: `use_backend("torch")` from now on, `with use_backend("torch"):` for a block.

    `use_backend("auto")` gives the choice back to each layer's `backend=` argument, then to MAGEP_FAST_BACKEND, then to
    the automatic choice by device, dtype and what is built.
    """

    def __init__(self, name: str):
        global _forced
        self.before = _forced
        _forced = None if check_backend(name) == AUTO else name

    def __enter__(self) -> use_backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _forced
        _forced = self.before


def requested_backend(requested: str) -> str:
    """The name of the forced backend, else the requested one, else that of the environment; perhaps "auto"."""
    return _forced or (requested if requested != AUTO else os.environ.get(ENVIRONMENT_VARIABLE, AUTO))


def choose_backend(
    requested: str, device: torch.device, dtype: torch.dtype, features: WeightFeatures | None = None
) -> Backend:
    """The backend that runs: the forced one, else the requested one, else that of the environment, else the best for
    features of this size."""
    name = requested_backend(requested)
    if check_backend(name) != AUTO:
        backend = _backends[name]
        reason = backend.unsupported(device, dtype)
        if reason is not None:
            raise RuntimeError(f"backend {name!r} cannot take {dtype} tensors on {device}: {reason}")
        return backend
    for backend in reversed(_backends.values()):
        if not _automatic(backend, device, dtype):
            continue
        if backend.hands_over is not None:
            other, most = backend.hands_over
            size = 0 if features is None else features.numbers_per_network
            if other in _backends and _automatic(_backends[other], device, dtype) and size > most:
                return _backends[other]
        return backend
    raise RuntimeError(f"no backend for {dtype} tensors on {device}")


def _automatic(backend: Backend, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether "auto" may choose the backend for tensors of this kind."""
    return backend.automatic and backend.missing() is None and backend.unsupported(device, dtype) is None
