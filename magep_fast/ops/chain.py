"""The suffix chain as one operation: S_t = W_L … W_(t+1), the products every trace and every [WW], [bW] is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magep_fast import factored
from magep_fast.ops.library import missing_library


def chain(weights: Sequence[Tensor]) -> list[Tensor]:
    """S_t for t = 0 … L − 1, `[B, d, n_L, n_t]` at index t."""
    w = weights[0]
    if w.device.type == "cpu" and w.dtype in (torch.float32, torch.float64) and missing_library() is None:
        return torch.ops.magep_fast.chain(list(weights))
    suffixes = factored.suffix_chain(weights)
    return [*suffixes, suffixes[-1] @ w][::-1] if len(weights) > 1 else suffixes
