"""Networks in and out of weight space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from magep_fast.spaces import WeightFeatures, WeightSpace, chained_layers


def from_modules(modules: nn.Module | Iterable[nn.Module]) -> WeightFeatures:
    """A batch of networks of one architecture as features of one channel.

    Kernel positions (taps) join the channel dimension: a convolution `[n_i, n_(i-1), kh, kw]` becomes
    `[kh·kw, n_i, n_(i-1)]`, as does a dense layer that reads a flattened feature map. A layer without bias counts as
    one with a zero bias. The result does not share memory with the modules.
    """
    networks = [modules] if isinstance(modules, nn.Module) else list(modules)
    if not networks:
        raise ValueError("from_modules needs at least one network")
    space = WeightSpace.of(networks[0])
    weights: list[list[torch.Tensor]] = [[] for _ in space.taps]
    biases: list[list[torch.Tensor]] = [[] for _ in space.taps]
    for number, network in enumerate(networks):
        if WeightSpace.of(network) != space:
            raise ValueError(f"network {number} is {WeightSpace.of(network)}; expected {space} as network 0")
        for i, (_, layer) in enumerate(chained_layers(network)):
            n_out, n_in = space.widths[i + 1], space.widths[i]
            w = layer.weight.detach().reshape(n_out, n_in, space.taps[i])
            weights[i].append(w.permute(2, 0, 1))
            biases[i].append(w.new_zeros(n_out) if layer.bias is None else layer.bias.detach())
    return WeightFeatures(map(torch.stack, weights), (torch.stack(b).unsqueeze(1) for b in biases))


def to_modules(features: WeightFeatures, modules: nn.Module | Sequence[nn.Module]) -> None:
    """Writes features of one channel into the networks, in place: the inverse of `from_modules`."""
    networks = [modules] if isinstance(modules, nn.Module) else list(modules)
    if len(networks) != features.batch_size:
        raise ValueError(f"{features.batch_size} networks of features cannot be written into {len(networks)} modules")
    for number, network in enumerate(networks):  # all is checked before anything is written
        features.check(WeightSpace.of(network), channels=1)
        for (name, layer), b in zip(chained_layers(network), features.biases, strict=True):
            if layer.bias is None and b[number].any():
                raise ValueError(f"layer '{name}' has no bias but the features of network {number} have one")
    with torch.no_grad():
        for number, network in enumerate(networks):
            for (_, layer), w, b in zip(chained_layers(network), features.weights, features.biases, strict=True):
                layer.weight.copy_(w[number].permute(1, 2, 0).reshape(layer.weight.shape))
                if layer.bias is not None:
                    layer.bias.copy_(b[number, 0])
