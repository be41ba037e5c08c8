"""The two chains of matrix products as one operation, the building block of the layers."""

from __future__ import annotations

import torch
from torch import Tensor

from magep_fast.ops.autocast import autocast_dtype
from magep_fast.ops.backends import choose_backend
from magep_fast.spaces import WeightFeatures


def chain(features: WeightFeatures, backend: str = "auto") -> tuple[list[Tensor], list[Tensor]]:
    """All products of weight matrices that the layers are made of, per network and channel.

    Returns:
        A_i = [W_i … W_1 | W_i … W_2 b_1 | … | W_i b_(i-1)] for i = 1 … L, `[B, d, n_i, n_0 + i − 1]`,
        S_t = W_L … W_(t+1) for t = 1 … L − 1, `[B, d, n_L, n_t]`; S_0 is the first n_0 columns of A_L.
        A_1 and S_(L-1) may be the weights themselves, not copies.
    """
    space = features.space
    if set(space.taps) != {1}:
        raise ValueError(f"products of layers need one weight per connection; found {space}")
    dtype = autocast_dtype(features)
    if dtype is not None:
        with torch.autocast(features.device.type, enabled=False):
            return chain(features.to(dtype), backend)
    chosen = choose_backend(backend, features.device, features.dtype, features)
    return chosen.chain(features.weights, features.biases)
