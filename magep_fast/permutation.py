"""Layers that respect permutations of neurons only: NP (Zhou et al. 2023) and the encoders around it.

The paper's Fashion-MNIST and editing networks end in them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from magep_fast.spaces import WeightFeatures, WeightSpace


class NPEquivariant(nn.Module):
    """The NP layer: linear, equivariant to permuting the neurons of every layer, input and output neurons too.

    With ⟨·⟩_r and ⟨·⟩_c the means over rows and columns, and everything stacked along channels,

        own     W_i                                              where it stands
        column  ⟨W_i⟩_c, b_i, ⟨W_(i+1)⟩_r                        what is known of neuron j of layer i
        row     ⟨W_i⟩_r, ⟨W_(i-1)⟩_c, b_(i-1)                    what is known of neuron k of layer i − 1
        whole   the means of all weights and all biases

    E(W)_i = own + row + column + whole and E(b)_i = column + whole, each through a matrix of its own, plus a constant.

    Args:
        space: of the features; hidden widths do not matter to the parameters.
        in_channels, out_channels: of the biases; weights have channels·taps.
    """

    def __init__(self, space: WeightSpace, in_channels: int, out_channels: int):
        super().__init__()
        self.space, self.in_channels, self.out_channels = space, in_channels, out_channels
        L, taps = space.num_layers, space.taps
        whole = sum(taps) + L
        self.weight_maps, self.bias_maps = nn.ModuleList(), nn.ModuleList()
        self.sizes: list[tuple[int, int, int, int]] = []
        for i, f in enumerate(taps):
            row = f + (taps[i - 1] + 1 if i > 0 else 0)
            column = f + 1 + (taps[i + 1] if i < L - 1 else 0)
            own, row, column, whole_size = (in_channels * n for n in (f, row, column, whole))
            self.sizes.append((own, row, column, whole_size))
            # nn.Linear holds the matrices side by side; its own initialisation then fits their joint number of inputs.
            self.weight_maps.append(nn.Linear(own + row + column + whole_size, out_channels * f))
            self.bias_maps.append(nn.Linear(column + whole_size, out_channels))

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        features.check(self.space, self.in_channels)
        weights, biases = features.weights, features.biases
        over_rows, over_columns = [w.mean(-2) for w in weights], [w.mean(-1) for w in weights]
        whole = torch.cat([*(x.mean(-1) for x in over_rows), *(b.mean(-1) for b in biases)], dim=1)
        new_weights, new_biases = [], []
        for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
            row = torch.cat([over_rows[i], *([over_columns[i - 1], biases[i - 1]] if i > 0 else [])], dim=1)
            column = torch.cat([over_columns[i], b, *over_rows[i + 1 : i + 2]], dim=1)
            to_weight: nn.Linear = self.weight_maps[i]  # type: ignore[assignment]
            to_bias: nn.Linear = self.bias_maps[i]  # type: ignore[assignment]
            by_own, by_row, by_column, by_whole = to_weight.weight.split(self.sizes[i], dim=1)
            constant = whole @ by_whole.T + to_weight.bias
            new_weights.append(
                (by_own @ w.flatten(2)).view(w.shape[0], -1, *w.shape[2:])
                + (by_row @ row).unsqueeze(-2)
                + (by_column @ column + constant.unsqueeze(-1)).unsqueeze(-1)
            )
            by_column, by_whole = to_bias.weight.split(self.sizes[i][2:], dim=1)
            new_biases.append(by_column @ column + (whole @ by_whole.T + to_bias.bias).unsqueeze(-1))
        return WeightFeatures(new_weights, new_biases)

    def extra_repr(self) -> str:
        return f"{self.space}, {self.in_channels} -> {self.out_channels}"


class NPPool(nn.Module):
    """The mean of every weight matrix and every bias, invariant to permutations: `[B, C·(taps_1 + … + taps_L + L)]`."""

    def forward(self, features: WeightFeatures) -> Tensor:
        return torch.cat([x.flatten(2).mean(-1) for x in features.tensors()], dim=1)


class FourierFeatures(nn.Module):
    """Gaussian Fourier features: sin and cos of 2π random projections of the channels, `out_channels` in all.

    Not compatible with scaling or sign flips: what follows respects permutations at most. For features with one weight
    per connection.
    """

    projections: Tensor

    def __init__(self, in_channels: int, out_channels: int = 256, scale: float = 3.0):
        super().__init__()
        if out_channels % 2:
            raise ValueError(f"out_channels must be even, a sine and a cosine of each projection; found {out_channels}")
        self.register_buffer("projections", scale * torch.randn(out_channels // 2, in_channels))

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        return features.map(self._encode)

    def _encode(self, x: Tensor) -> Tensor:
        angles = (2 * math.pi * self.projections @ x.flatten(2)).unflatten(2, x.shape[2:])
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    def extra_repr(self) -> str:
        return f"{self.projections.shape[1]} -> {2 * self.projections.shape[0]}"


class PositionEncoding(nn.Module):
    """Appends sines and cosines of where a weight stands, so that layers which treat input and output neurons alike can
    tell them apart: 2·bands + 1 channels.

    A position x ∈ [−1, 1] is encoded as sin(πsx), cos(πsx) and x, with s from 1 to max_frequency / 2. The encodings of
    the input neuron (in W_1), the output neuron (in W_L, b_L) and, with `layers`, the layer are added up.
    """

    def __init__(self, space: WeightSpace, max_frequency: float = 3.0, bands: int = 3, layers: bool = True):
        super().__init__()
        self.channels = 2 * bands + 1
        scales = math.pi * torch.linspace(1, max_frequency / 2, bands)

        def encode(count: int) -> Tensor:  # [channels, count]
            x = torch.linspace(-1, 1, count)
            angles = scales[:, None] * x
            return torch.cat([angles.sin(), angles.cos(), x[None]])

        L = space.num_layers
        layer = encode(L) if layers else torch.zeros(self.channels, L)
        for i in range(L):
            weight, bias = layer[:, i, None, None], layer[:, i, None]
            if i == 0:
                weight = weight + encode(space.n_in)[:, None, :]
            if i == L - 1:
                weight, bias = weight + encode(space.n_out)[:, :, None], bias + encode(space.n_out)
            self.register_buffer(f"weight_{i + 1}", weight, persistent=False)
            self.register_buffer(f"bias_{i + 1}", bias, persistent=False)

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        def append(x: Tensor, encoding: Tensor) -> Tensor:
            return torch.cat([x, encoding.expand(x.shape[0], self.channels, *x.shape[2:])], dim=1)

        return WeightFeatures(
            (append(w, getattr(self, f"weight_{i}")) for i, w in enumerate(features.weights, start=1)),
            (append(b, getattr(self, f"bias_{i}")) for i, b in enumerate(features.biases, start=1)),
        )


class LearnedScale(nn.Module):
    """Multiplies every weight matrix and every bias by a learned number of its own."""

    def __init__(self, space: WeightSpace, start: float = 0.01):
        super().__init__()
        self.scale = nn.Parameter(torch.full((2 * space.num_layers,), start))

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        L = features.num_layers
        scaled = [x * s for x, s in zip(features.tensors(), self.scale, strict=True)]
        return WeightFeatures(scaled[:L], scaled[L:])
