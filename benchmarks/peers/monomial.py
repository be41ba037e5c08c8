"""Monomial-NFN (Tran et al. 2024): three linear monomial-equivariant layers of 16, 16 and 5 channels, features that no
scale (ReLU) or sign (tanh) changes, their means, and an MLP.

In its literal form, one einsum per term, as its authors run it: a rival is not sped up by this package's kernels.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.peers import Subset
from benchmarks.peers.heads import HnpPool, accuracy_head
from magep_fast import MonomialEquivariant, WeightFeatures, WeightSpace

CHANNELS = (1, 16, 16, 5)


class Normalise(nn.Module):
    """The channels of each weight and bias over their Euclidean norm, which no positive scale changes, times a learned
    factor plus a learned constant per channel."""

    def __init__(self, space: WeightSpace, channels: int):
        super().__init__()
        sizes = [*(channels * f for f in space.taps), *(channels,) * space.num_layers]
        self.factors = nn.ParameterList(torch.randn(n) for n in sizes)
        self.constants = nn.ParameterList(torch.randn(n) for n in sizes)

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        new = []
        for x, factor, constant in zip(features.tensors(), self.factors, self.constants, strict=True):
            shape = (-1, *(1,) * (x.dim() - 2))
            new.append(factor.view(shape) * nn.functional.normalize(x, dim=1) + constant.view(shape))
        return WeightFeatures(new[: features.num_layers], new[features.num_layers :])


class Magnitude(nn.Module):
    """|x|, which no sign changes."""

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        return features.map(Tensor.abs)


def build(space: WeightSpace, subset: Subset) -> nn.Module:
    layers = [
        MonomialEquivariant(
            space, d, e, out_taps=space.taps, activation=subset, init="xavier_normal", backend="reference"
        )
        for d, e in pairwise(CHANNELS)
    ]
    invariants = Normalise(space, CHANNELS[-1]) if subset == "relu" else Magnitude()
    pooled = CHANNELS[-1] * HnpPool.num_outputs(space)
    hidden = 200 if subset == "relu" else 1000
    return nn.Sequential(*layers, invariants, HnpPool(), accuracy_head(pooled, hidden))
