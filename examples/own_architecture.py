"""A network of your own that reads networks, in ten lines: which activation was this MLP initialised for?

python -m examples.own_architecture
"""

import torch
from torch import Tensor, nn

from magep_fast import MagepEquivariant, MagepInvariant, WeightFeatures, WeightSpace, from_modules


class Reader(nn.Module):
    """Features of the networks, and of the networks and their features together, read by one invariant layer each."""

    def __init__(self, space: WeightSpace, channels: int = 8, classes: int = 2):
        super().__init__()
        self.lift = MagepEquivariant(space, 1, channels, activation="relu")
        self.mix = MagepEquivariant(space, channels, channels, terms={"W", "b", "1", "Wb"}, activation="relu")
        self.read = nn.ModuleList([MagepInvariant(space, channels, 16), MagepInvariant(space, channels, 16)])
        self.head = nn.Linear(32, classes)

    def forward(self, networks: WeightFeatures) -> Tensor:
        first = self.lift(networks)
        answers = [read(x) for read, x in zip(self.read, (first, self.mix(first)), strict=True)]
        return self.head(torch.cat(answers, dim=1).tanh())


def make_network(kaiming: int) -> nn.Module:
    """An MLP 4-16-16-3 whose weights have variance 2 / fan-in (for ReLU) or 1 / fan-in."""
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    for layer in network[::2]:
        nn.init.normal_(layer.weight, std=((1 + kaiming) / layer.in_features) ** 0.5)
    return network


def main(steps: int = 60) -> float:
    torch.manual_seed(0)
    labels = torch.arange(256) % 2
    networks = from_modules(make_network(int(label)) for label in labels)
    model = Reader(networks.space)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(networks[:192]), labels[:192]).backward()
        optimizer.step()
    accuracy = (model(networks[192:]).argmax(1) == labels[192:]).float().mean().item()
    print(f"right about {accuracy:.0%} of 64 networks it has not seen")
    return accuracy


if __name__ == "__main__":
    main()
