"""Neural graphs (Kofinas et al. 2024) in the PNA form: message passing with four aggregators and two degree scalers,
messages modulated by edge features, edge features updated after each layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import DegreeScalerAggregation

from benchmarks.peers.graph import NeuralGraph
from magep_fast import WeightFeatures, WeightSpace
from magep_fast.models import mlp

AGGREGATORS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification"]


class FourierEncoding(nn.Module):
    """sin and cos of `frequencies` random projections, through a dense layer."""

    projections: Tensor

    def __init__(self, inputs: int, outputs: int, frequencies: int = 128, scale: float = 3.0):
        super().__init__()
        self.register_buffer("projections", scale * torch.randn(inputs, frequencies))
        self.dense = nn.Linear(2 * frequencies, outputs)

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x @ self.projections
        return self.dense(torch.cat([angles.cos(), angles.sin()], dim=-1))


class PnaLayer(MessagePassing):  # type: ignore[misc]
    """m_ij = scale(e_ij) ⊙ φ(x_i, x_j) + shift(e_ij), x_i' = ψ(x_i, ⊕_j m_ij), ⊕ every scaler of every aggregator."""

    def __init__(self, channels: int, degrees: Tensor):
        super().__init__(aggr=DegreeScalerAggregation(AGGREGATORS, SCALERS, degrees))
        self.modulation = nn.Linear(channels, 2 * channels)
        self.pair = nn.Linear(2 * channels, channels)
        aggregated = len(AGGREGATORS) * len(SCALERS) * channels
        self.update_node = nn.Sequential(nn.Linear(channels + aggregated, channels), nn.Linear(channels, channels))

    def forward(self, nodes: Tensor, edge_index: Tensor, edges: Tensor) -> Tensor:
        gathered = self.propagate(edge_index, x=nodes, edges=edges)
        return self.update_node(torch.cat([nodes, gathered], dim=-1))

    def message(self, x_i: Tensor, x_j: Tensor, edges: Tensor) -> Tensor:
        scale, shift = self.modulation(edges).chunk(2, dim=-1)
        return scale * self.pair(torch.cat([x_i, x_j], dim=-1)) + shift


class EdgeUpdate(nn.Module):
    """e_ij' from e_ij, x_j and x_i by a dense layer, SiLU and another dense layer."""

    def __init__(self, channels: int):
        super().__init__()
        self.edge, self.source, self.target, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, nodes: Tensor, edge_index: Tensor, edges: Tensor) -> Tensor:
        hidden = self.edge(edges) + self.source(nodes)[edge_index[0]] + self.target(nodes)[edge_index[1]]
        return self.out(nn.functional.silu(hidden))


class NeuralGraphNetwork(nn.Module):
    """Fourier features of weights and biases with learned positions, PNA layers, an MLP on the output neurons.

    Kernels and dense weights have encoders of their own. Hidden neurons of a layer share a position, input and output
    neurons have one each.
    """

    def __init__(self, space: WeightSpace, channels: int, layers: int):
        super().__init__()
        self.graph = NeuralGraph(space)
        self.encode_bias = nn.Sequential(FourierEncoding(1, channels), nn.Linear(channels, channels))
        self.encode_weight = nn.ModuleDict({str(f): FourierEncoding(f, channels) for f in dict.fromkeys(space.taps)})
        self.encode_edge = nn.Linear(channels, channels)
        widths = self.graph.widths
        hidden = [torch.full((n,), widths[0] + i) for i, n in enumerate(widths[1:-1])]
        last = widths[0] + len(hidden)
        places = torch.cat([torch.arange(widths[0]), *hidden, last + torch.arange(widths[-1])])
        self.register_buffer("places", places, persistent=False)
        self.positions = nn.Parameter(torch.randn(int(places.max()) + 1, channels))
        degrees = torch.zeros(max(widths) + 1, dtype=torch.long)
        for before, n in zip([0, *widths], widths, strict=False):
            degrees[before] += n
        self.layers = nn.ModuleList(PnaLayer(channels, degrees) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(layers - 1))
        self.edge_updates = nn.ModuleList(EdgeUpdate(channels) for _ in range(layers - 1))
        self.head = nn.Sequential(mlp(widths[-1] * channels, channels, channels, 1), nn.Sigmoid())

    places: Tensor

    def forward(self, features: WeightFeatures) -> Tensor:
        graph, batch = self.graph, features.batch_size
        edge_index = graph.edge_index(batch)
        nodes = self.encode_bias(graph.node_features(features, inputs=0.0))
        nodes = nodes + self.positions[self.places].repeat_interleave(batch, dim=0)
        edges = torch.cat(
            [self.encode_weight[str(f)](graph.edge_features(features, i)) for i, f in enumerate(graph.taps)]
        )
        edges = self.encode_edge(edges)
        for k, layer in enumerate(self.layers):
            nodes = layer(nodes, edge_index, edges)
            if k < len(self.norms):
                nodes = nn.functional.silu(self.norms[k](nodes))
                edges = self.edge_updates[k](nodes, edge_index, edges)
        return self.head(graph.output_nodes(nodes, batch))


def build(space: WeightSpace, channels: int = 256) -> nn.Module:
    """256 channels as in its authors' run on the CNN zoo; their default is 32."""
    return NeuralGraphNetwork(space, channels, layers=4)
