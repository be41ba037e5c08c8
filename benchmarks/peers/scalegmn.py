"""ScaleGMN (Kalogeropoulos et al. 2024), forward form: message passing equivariant to scaling (ReLU) or to signs (tanh)
of hidden neurons.

A feature of hidden neuron i is multiplied by the neuron's scale λ_i, an edge from j to i by λ_i / λ_j. What is made of
them is a linear map of the feature itself times a function of its invariant part. Input and output neurons have no
symmetry, and plain MLPs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from benchmarks.peers import Subset
from benchmarks.peers.graph import NeuralGraph
from magep_fast import WeightFeatures, WeightSpace


def dense(inputs: int, outputs: int, hidden: int) -> nn.Sequential:
    """One hidden layer with layer norm and SiLU."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.SiLU(), nn.Linear(hidden, outputs))


class Direction(nn.Module):
    """x / ‖x‖, which no positive scale changes."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1, eps=1e-10)


class EvenPart(nn.Module):
    """ρ(x) + ρ(−x), which no sign changes."""

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.rho = dense(channels, channels, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.rho(x) + self.rho(-x)


def invariant_part(subset: Subset, channels: int, hidden: int) -> nn.Module:
    return Direction() if subset == "relu" else EvenPart(channels, hidden)


class Rescaling(nn.Module):
    """Γx ⊙ φ(invariant part of x): multiplied by whatever x is multiplied by."""

    def __init__(self, inputs: int, outputs: int, subset: Subset):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.factor = nn.Sequential(invariant_part(subset, inputs, outputs), dense(inputs, outputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor(x)


class ByKind(nn.Module):
    """Rescaling for hidden neurons, an MLP for the others: one for inputs and outputs (ReLU), or one each (tanh)."""

    def __init__(self, inputs: int, outputs: int, subset: Subset):
        super().__init__()
        self.hidden = Rescaling(inputs, outputs, subset)
        self.output = dense(inputs, outputs, outputs)
        self.input = self.output if subset == "relu" else dense(inputs, outputs, outputs)

    def forward(self, x: Tensor, sizes: tuple[int, int, int]) -> Tensor:
        """`sizes`: how many rows belong to input, hidden and output neurons, in this order."""
        first, middle, last = x.split(sizes)
        return torch.cat([self.input(first), self.hidden(middle), self.output(last)])


class ScaleLayer(MessagePassing):  # type: ignore[misc]
    """m_ij = MSG(Γ_v x_j ⊙ Γ_e e_ij), x_i' = UPD(x_i, Σ_j m_ij), e_ij' = Γ e_ij ⊙ φ(invariant parts of x_j and x_i)."""

    def __init__(self, channels: int, subset: Subset, updates_edges: bool):
        super().__init__(aggr="sum")
        self.of_node = nn.Linear(channels, channels, bias=False)
        self.of_edge = nn.Linear(channels, channels, bias=False)
        self.message_net = ByKind(channels, channels, subset)
        self.update_net = ByKind(2 * channels, channels, subset)
        if updates_edges:
            self.edge_linear = nn.Linear(channels, channels, bias=False)
            self.edge_invariant = invariant_part(subset, channels, channels)
            self.edge_factor = dense(2 * channels, channels, channels)
        self.updates_edges = updates_edges

    def forward(
        self,
        nodes: Tensor,
        edge_index: Tensor,
        edges: Tensor,
        node_sizes: tuple[int, int, int],
        edge_sizes: tuple[int, int, int],
    ) -> tuple[Tensor, Tensor]:
        gathered = self.propagate(edge_index, x=nodes, edges=edges, edge_sizes=edge_sizes)
        new_nodes = self.update_net(torch.cat([nodes, gathered], dim=-1), node_sizes)
        if not self.updates_edges:
            return new_nodes, edges
        invariants = self.edge_invariant(nodes)
        pairs = torch.cat([invariants[edge_index[0]], invariants[edge_index[1]]], dim=-1)
        return new_nodes, self.edge_linear(edges) * self.edge_factor(pairs)

    def message(self, x_j: Tensor, edges: Tensor, edge_sizes: tuple[int, int, int]) -> Tensor:
        return self.message_net(self.of_node(x_j) * self.of_edge(edges), edge_sizes)


class ScaleGraphNetwork(nn.Module):
    """Linear embeddings of biases and kernels with learned positions, which multiply hidden neurons and are added to
    the others; layers; a readout of the output neurons (ReLU) or of all of them (tanh)."""

    places: Tensor

    def __init__(self, space: WeightSpace, subset: Subset, channels: int, layers: int):
        super().__init__()
        self.graph = NeuralGraph(space)
        widths = self.graph.widths
        self.num_hidden = sum(widths[1:-1])
        self.embed_bias = nn.Linear(1, channels, bias=False)
        self.embed_weight = nn.Linear(self.graph.max_taps, channels, bias=False)
        hidden = [torch.full((n,), widths[0] + i) for i, n in enumerate(widths[1:-1])]
        last = widths[0] + len(hidden)
        places = torch.cat([torch.arange(widths[0]), *hidden, last + torch.arange(widths[-1])])
        self.register_buffer("places", places, persistent=False)
        self.positions = nn.Parameter(torch.randn(int(places.max()) + 1, channels))
        self.layers = nn.ModuleList(ScaleLayer(channels, subset, k < layers - 1) for k in range(layers))
        self.reads_all = subset == "tanh"
        outputs = widths[-1] * channels
        if self.reads_all:
            self.hidden_invariants = nn.Sequential(
                invariant_part(subset, channels, channels), dense(channels, channels, channels)
            )
            outputs += (widths[0] + 1) * channels
        self.head = nn.Sequential(dense(outputs, 1, channels), nn.Sigmoid())

    def forward(self, features: WeightFeatures) -> Tensor:
        graph, batch = self.graph, features.batch_size
        first, last = graph.widths[0] * batch, graph.widths[-1] * batch
        node_sizes = (first, self.num_hidden * batch, last)
        edge_sizes = (0, sum(graph.num_edges[:-1]) * batch, graph.num_edges[-1] * batch)
        edge_index = graph.edge_index(batch)
        embedded = self.embed_bias(graph.node_features(features, inputs=1.0))
        positions = self.positions[self.places].repeat_interleave(batch, dim=0)
        (x_in, x_hidden, x_out), (p_in, p_hidden, p_out) = embedded.split(node_sizes), positions.split(node_sizes)
        nodes = torch.cat([x_in + p_in, x_hidden * p_hidden, x_out + p_out])
        edges = self.embed_weight(
            torch.cat(
                [
                    nn.functional.pad(graph.edge_features(features, i), (0, graph.max_taps - f))
                    for i, f in enumerate(graph.taps)
                ]
            )
        )
        for layer in self.layers:
            nodes, edges = layer(nodes, edge_index, edges, node_sizes, edge_sizes)
        read = graph.output_nodes(nodes, batch)
        if self.reads_all:
            x_in, x_hidden, _ = nodes.split(node_sizes)
            hidden = self.hidden_invariants(x_hidden).view(self.num_hidden, batch, -1).sum(0)
            read = torch.cat([hidden, x_in.view(-1, batch, x_in.shape[1]).transpose(0, 1).flatten(1), read], dim=1)
        return self.head(read)


def build(space: WeightSpace, subset: Subset) -> nn.Module:
    return ScaleGraphNetwork(space, subset, channels=128, layers=4)
