"""Networks of a data set brought to the scale that the layers' initialisation expects."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from magep_fast import WeightFeatures


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
