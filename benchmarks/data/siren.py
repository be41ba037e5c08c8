"""SIRENs (Sitzmann et al. 2020) as rows of weight space: h_i = sin(ω_i (W_i h_(i-1) + b_i)), the last layer linear.

What differs among the SIRENs people have is in `Siren`: the frequencies, and the number added to the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from magep_fast import WeightFeatures, WeightSpace


@dataclass(frozen=True)
class Siren:
    """A variant of SIREN.

    Args:
        omega: ω of the hidden layers after the first.
        first_omega: ω of the first layer.
        offset: added to the output to give a pixel in [0, 1].
    """

    omega: float = 30.0
    first_omega: float = 30.0
    offset: float = 0.5

    @staticmethod
    def of(options: dict[str, Any]) -> Siren:
        """The variant that a data set's options name."""
        return Siren(**{name: options[name] for name in ("omega", "first_omega", "offset") if name in options})

    def omegas(self, layers: int) -> list[float]:
        return [self.first_omega, *(self.omega,) * (layers - 2)]

    def initialise(self, space: WeightSpace, count: int, generator: torch.Generator) -> WeightFeatures:
        """As its authors do it: W_1 uniform in ±1/n_0, later weights in ±√(6/n)/ω, biases in ±1/√n."""
        weights, biases = [], []
        for i, (m, n) in enumerate(pairwise(space.widths)):
            assert m is not None and n is not None
            bound = 1 / m if i == 0 else (6 / m) ** 0.5 / self.omega
            weights.append(bound * (2 * torch.rand(count, 1, n, m, generator=generator) - 1))
            biases.append(m**-0.5 * (2 * torch.rand(count, 1, n, generator=generator) - 1))
        return WeightFeatures(weights, biases)

    def render(self, networks: WeightFeatures, height: int, width: int) -> Tensor:
        """The images that networks of one channel hold, `[B, height, width, colours]`; differentiable."""
        h = coordinates(height, width).to(networks.device, networks.dtype).expand(networks.batch_size, -1, -1)
        omegas = self.omegas(networks.num_layers)
        for i, (w, b) in enumerate(zip(networks.weights, networks.biases, strict=True)):
            h = torch.baddbmm(b, h, w.squeeze(1).mT)
            h = (omegas[i] * h).sin() if i < len(omegas) else h + self.offset
        return h.unflatten(1, (height, width))

    def reduce_phases(self, networks: WeightFeatures) -> WeightFeatures:
        """The same functions with phases ω b of hidden neurons in ±π/2.

        sin is unchanged if ω b moves by 2π, and turns its sign, which the weights behind it can undo, if by π; a fresh
        SIREN has phases up to ±ω, many turns apart. Goes along with every permutation and sign flip of neurons.
        """
        weights, biases = list(networks.weights), list(networks.biases)
        for i, omega in enumerate(self.omegas(networks.num_layers)):
            turns = (biases[i] * (omega / math.pi)).round()
            biases[i] = biases[i] - turns * (math.pi / omega)
            weights[i + 1] = weights[i + 1] * (1 - 2 * turns.remainder(2)).unsqueeze(2)
        return WeightFeatures(weights, biases)


@dataclass(frozen=True)
class UnitForm:
    """SIRENs in a form that is easier to learn from: phases reduced, and each tensor over a constant, so that weights
    have variance 1/n_(i-1) and biases variance 1, the scale that fresh MAGEP layers expect.

    Args:
        constants: one for each tensor, all weights first.
    """

    siren: Siren
    constants: tuple[float, ...]

    @staticmethod
    def of(siren: Siren, typical: WeightFeatures) -> UnitForm:
        """With the constants that fit these networks."""
        reduced = siren.reduce_phases(typical)
        fans = [*(w.shape[-1] for w in reduced.weights), *(1 for _ in reduced.biases)]
        sizes = [x.square().mean().mul(n).sqrt().item() for x, n in zip(reduced.tensors(), fans, strict=True)]
        return UnitForm(siren, tuple(size or 1.0 for size in sizes))

    def to(self, networks: WeightFeatures) -> WeightFeatures:
        return self._times(self.siren.reduce_phases(networks), [1 / c for c in self.constants])

    def back(self, networks: WeightFeatures) -> WeightFeatures:
        """SIRENs again, that hold the images of the ones in this form."""
        return self._times(networks, self.constants)

    def render(self, networks: WeightFeatures, height: int, width: int) -> Tensor:
        """The images that networks in this form hold."""
        return self.siren.render(self.back(networks), height, width)

    @staticmethod
    def _times(networks: WeightFeatures, factors: Sequence[float]) -> WeightFeatures:
        scaled = [x * factor for x, factor in zip(networks.tensors(), factors, strict=True)]
        return WeightFeatures(scaled[: networks.num_layers], scaled[networks.num_layers :])


def coordinates(height: int, width: int) -> Tensor:
    """Where pixels are, row by row: (y, x) in [−1, 1]², `[height·width, 2]`."""
    y, x = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    return torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1)


def psnr(images: Tensor, targets: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, of pixels in [0, 1] and not clamped: `[B]`."""
    return -10 * (images - targets).square().flatten(1).mean(1).clamp_min(1e-12).log10()
