"""The invariant layer as one operation."""

from __future__ import annotations

import torch
from torch import Tensor

from magep_fast.ops.autocast import autocast_dtype
from magep_fast.ops.backends import choose_backend
from magep_fast.spaces import WeightFeatures
from magep_fast.terms import Table


def invariant(
    table: Table, features: WeightFeatures, matrix: Tensor, psi: Tensor | None, backend: str = "auto"
) -> Tensor:
    """I(U) for a batch of networks: `[B, out_features]`.

    Args:
        table: of `terms.invariant_table`.
        features: weights `[B, d, n_i, n_(i-1)]`, biases `[B, d, n_i]`.
        matrix: the coefficients, of the shape of the table's only output.
        psi: the connections, of `table.psi_shape`, or None if no term needs them.
    """
    dtype = autocast_dtype(features)
    if dtype is not None:
        with torch.autocast(features.device.type, enabled=False):
            return invariant(
                table, features.to(dtype), matrix.to(dtype), None if psi is None else psi.to(dtype), backend
            )
    chosen = choose_backend(backend, features.device, features.dtype, features)
    return chosen.invariant(table, features.weights, features.biases, matrix, psi)
