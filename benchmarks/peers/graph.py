"""A batch of networks as one graph: neurons are nodes, weights are edges from layer to layer."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from magep_fast import WeightFeatures, WeightSpace


class NeuralGraph(nn.Module):
    """Nodes and edges of a batch, neuron by neuron and layer by layer, networks innermost: rows `neuron·B + network`.

    So the neurons of a layer, and the edges into it, are a contiguous slice.
    """

    def __init__(self, space: WeightSpace):
        super().__init__()
        widths = [n for n in space.widths if n is not None]
        if len(widths) != len(space.widths):
            raise ValueError(f"a graph needs every width; some are open in {space}")
        self.widths, self.taps = widths, space.taps
        self.num_nodes = sum(widths)
        self.num_edges = [n * m for m, n in pairwise(widths)]
        self.max_taps = max(space.taps)
        starts = [0, *accumulate(widths)]
        edges = [
            torch.stack([first + torch.arange(m).repeat(n), second + torch.arange(n).repeat_interleave(m)])
            for (m, n), (first, second) in zip(pairwise(widths), pairwise(starts[:-1]), strict=True)
        ]
        self.register_buffer("edges", torch.cat(edges, dim=1), persistent=False)
        self._index: dict[tuple[int, torch.device], Tensor] = {}

    edges: Tensor

    def edge_index(self, batch_size: int) -> Tensor:
        """Source and target row of every edge, `[2, E·B]`. The same for all batches of a size, so kept."""
        key = (batch_size, self.edges.device)
        if key not in self._index:
            copies = torch.arange(batch_size, device=self.edges.device)
            self._index[key] = (self.edges[..., None] * batch_size + copies).flatten(1)
        return self._index[key]

    def node_features(self, features: WeightFeatures, inputs: float) -> Tensor:
        """Biases `[N·B, 1]`; input neurons, which have none, get the number `inputs`."""
        first = features.biases[0].new_full((self.widths[0] * features.batch_size, 1), inputs)
        return torch.cat([first, *(b.permute(2, 0, 1).reshape(-1, 1) for b in features.biases)])

    def edge_features(self, features: WeightFeatures, layer: int) -> Tensor:
        """Weights of a layer (from 0) `[n·m·B, taps]`."""
        w = features.weights[layer]
        return w.permute(2, 3, 0, 1).reshape(-1, w.shape[1])

    def output_nodes(self, nodes: Tensor, batch_size: int) -> Tensor:
        """`[N·B, d]` to the features of the output neurons in a row, `[B, n_L·d]`."""
        last = nodes.view(self.num_nodes, batch_size, -1)[-self.widths[-1] :]
        return last.transpose(0, 1).flatten(1)
