"""PyPI's `nfn` behind WeightFeatures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

from nfn.common import ArraySpec, NetworkSpec, WeightSpaceFeatures
from nfn.layers import HNPLinear, HNPPool, NPLinear, TupleOp
from torch import nn

from benchmarks.peers.heads import accuracy_head
from magep_fast import WeightFeatures, WeightSpace
from magep_fast.permutation import FourierFeatures, PositionEncoding


def network_spec(space: WeightSpace) -> NetworkSpec:
    """nfn's description of a space; taps are a kernel of taps × 1."""
    shapes = [(n, m) if f == 1 else (n, m, f, 1) for (m, n), f in zip(pairwise(space.widths), space.taps, strict=True)]
    return NetworkSpec([ArraySpec(shape) for shape in shapes], [ArraySpec((n,)) for n in space.widths[1:]])


class ToNfn(nn.Module):
    """WeightFeatures in nfn's class: taps leave the channels, `[B, C·taps, n, m]` becomes `[B, C, n, m, taps, 1]`."""

    def __init__(self, space: WeightSpace):
        super().__init__()
        self.taps = space.taps

    def forward(self, features: WeightFeatures) -> WeightSpaceFeatures:
        weights = [
            w if f == 1 else w.unflatten(1, (-1, f, 1)).permute(0, 1, 4, 5, 2, 3)
            for w, f in zip(features.weights, self.taps, strict=True)
        ]
        return WeightSpaceFeatures(weights, features.biases)


class Chain(nn.Sequential):
    """Layers in nfn's form that take WeightFeatures."""

    def __init__(self, space: WeightSpace, layers: Iterable[nn.Module]):
        super().__init__(ToNfn(space), *layers)


def relu_layers(layer: Callable[[int, int], nn.Module], channels: Sequence[int]) -> list[nn.Module]:
    """Layers `layer(d, e)` between these numbers of channels, each followed by ReLU."""
    return [x for d, e in pairwise(channels) for x in (layer(d, e), TupleOp(nn.ReLU()))]


def accuracy_network(space: WeightSpace, kind: Callable[..., nn.Module]) -> nn.Module:
    """What NP and HNP of Zhou et al. 2023 have in common on CNNs: three layers of a kind, the pool, the head."""
    spec, channels = network_spec(space), (1, 16, 16, 5)
    layers = relu_layers(partial(kind, spec), channels)
    head = accuracy_head(channels[-1] * HNPPool.get_num_outs(spec), hidden=1000)
    return Chain(space, [*layers, HNPPool(spec), nn.Flatten(), head])


class EncodedLayers:
    """What NP and HNP of Zhou et al. 2023 have in common on SIRENs.

    Args:
        kind: "np" or "hnp".
        fourier, fourier_scale: number and scale of the Fourier features.
        layer_positions: whether the positions, which NP gets, tell layers apart.

    `encoders` are Gaussian Fourier features and positions, `body` the layers with ReLU, `layer` makes one more.
    """

    def __init__(
        self,
        kind: str,
        space: WeightSpace,
        channels: int,
        layers: int,
        fourier: int,
        fourier_scale: float,
        layer_positions: bool,
    ):
        self.spec = network_spec(space)
        self.encoders: list[nn.Module] = [FourierFeatures(1, fourier, fourier_scale)]
        inputs = fourier
        if kind == "np":
            position = PositionEncoding(space, layers=layer_positions)
            self.encoders.append(position)
            inputs += position.channels
        self.layer = partial(NPLinear if kind == "np" else HNPLinear, self.spec)
        self.body = relu_layers(self.layer, [inputs, *(channels,) * layers])
