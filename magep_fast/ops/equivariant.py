"""The equivariant layer as one operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magep_fast.ops.autocast import autocast_dtype
from magep_fast.ops.backends import choose_backend
from magep_fast.spaces import WeightFeatures
from magep_fast.terms import Table


def equivariant(
    table: Table,
    features: WeightFeatures,
    matrices: Sequence[Tensor],
    psi: Tensor | None,
    activation: str | None = None,
    backend: str = "auto",
) -> WeightFeatures:
    """f(E(U)) for a batch of networks.

    Args:
        table: of `terms.equivariant_table`.
        features: weights `[B, d·taps_i, n_i, n_(i-1)]`, biases `[B, d, n_i]`.
        matrices: the coefficients, one matrix per output of the table.
        psi: the connections, of `table.psi_shape`, or None if no term needs them.
        activation: the name of f, of `activations.FUNCTIONS`, or None for none.
    """
    dtype = autocast_dtype(features)
    if dtype is not None:
        with torch.autocast(features.device.type, enabled=False):
            psi = None if psi is None else psi.to(dtype)
            return equivariant(table, features.to(dtype), [m.to(dtype) for m in matrices], psi, activation, backend)
    chosen = choose_backend(backend, features.device, features.dtype, features)
    return WeightFeatures(*chosen.equivariant(table, features.weights, features.biases, matrices, psi, activation))
