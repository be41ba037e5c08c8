"""What several examples need: networks run on points, and brought to the scale that the layers expect."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from magep_fast import WeightFeatures


def run(networks: WeightFeatures, points: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Outputs `[networks, points, n_L]` of networks of one channel on points `[points, n_0]`."""
    x = points.mT
    for i, (w, b) in enumerate(zip(networks.weights, networks.biases, strict=True)):
        x = w[:, 0] @ (x if i == 0 else activation(x)) + b[:, 0, :, None]
    return x.mT


class Standardise(nn.Module):
    """Divides each layer by constants of a data set: rows of weights get length 1 and biases size 1, on average.

    Constants, not statistics of the network at hand: so neither symmetry nor padding is disturbed.
    """

    scale: Tensor

    def __init__(self, networks: Sequence[WeightFeatures]):
        super().__init__()
        squares = [
            [*(w.square().sum(-1).mean() for w in x.weights), *(b.square().mean() for b in x.biases)] for x in networks
        ]
        self.register_buffer("scale", torch.tensor(squares).mean(0).sqrt())

    def forward(self, networks: WeightFeatures) -> WeightFeatures:
        scaled = [x / scale for x, scale in zip(networks.tensors(), self.scale, strict=True)]
        return WeightFeatures(scaled[: networks.num_layers], scaled[networks.num_layers :])
