"""The MLP on all weights and biases in a row: no symmetry at all."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.peers.heads import accuracy_head
from magep_fast import WeightFeatures, WeightSpace


class Flatten(nn.Module):
    def forward(self, features: WeightFeatures) -> Tensor:
        return torch.cat([x.flatten(1) for x in features.tensors()], dim=1)


def numbers(space: WeightSpace) -> int:
    """Weights and biases of a network of this space."""
    widths = [n for n in space.widths if n is not None]
    if len(widths) != len(space.widths):
        raise ValueError(f"an MLP needs every width; some are open in {space}")
    return sum(n * (m * f + 1) for (m, n), f in zip(pairwise(widths), space.taps, strict=True))


def build(space: WeightSpace) -> nn.Module:
    return nn.Sequential(Flatten(), accuracy_head(numbers(space), hidden=1000))
