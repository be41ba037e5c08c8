"""The pool and the MLP that several rivals end in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magep_fast import WeightFeatures, WeightSpace
from magep_fast.models import mlp


class HnpPool(nn.Module):
    """Means over hidden neurons: of W_1 over rows, of W_L over columns, of b_L over nothing, of the others over all.

    `[B, C·num_outputs(space)]`.
    """

    @staticmethod
    def num_outputs(space: WeightSpace) -> int:
        first, *middle, last = space.taps
        return first * space.n_in + sum(middle) + last * space.n_out + (space.num_layers - 1) + space.n_out

    def forward(self, features: WeightFeatures) -> Tensor:
        first, *middle, last = features.weights
        *hidden, output = features.biases
        means = [first.mean(2), *(w.mean((2, 3)) for w in middle), last.mean(3), *(b.mean(2) for b in hidden), output]
        return torch.cat([x.flatten(1) for x in means], dim=1)


def accuracy_head(inputs: int, hidden: int) -> nn.Sequential:
    """An MLP of two hidden layers and a sigmoid: `[B, 1]` in (0, 1)."""
    return nn.Sequential(mlp(inputs, hidden, hidden, 1), nn.Sigmoid())
