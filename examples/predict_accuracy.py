"""Predict the accuracy of networks from their weights alone: a folder of .safetensors files and accuracies.csv.

    python -m examples.predict_accuracy FOLDER             # trains a predictor on your folder, tests it on a tenth
    python -m examples.predict_accuracy FOLDER --make 400  # fills the folder first, with MLPs trained on a spiral

accuracies.csv has a line `file,accuracy` for each network. Widths may differ from file to file.
"""

import argparse
import csv
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.shared import Standardise, run
from magep_fast import (
    BucketSampler,
    MagepEquivariant,
    MagepInvariant,
    NetworkDataset,
    WeightFeatures,
    collate_fn,
    from_safetensors,
    to_safetensors,
)

FEWEST = 20
"""Networks of which a tenth is two, the least that has an order."""


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", type=int, default=0, metavar="N", help="first write N networks into the folder")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.make and options.make < FEWEST:
        parser.error(f"--make {options.make} is too few to test a predictor on a tenth of them; make {FEWEST} or more")
    torch.manual_seed(0)
    if options.make:
        make_networks(options.folder, options.make)
    table = options.folder / "accuracies.csv"
    if not table.exists():
        parser.error(f"{table} is missing: a row `file,accuracy` for each network in the folder; --make 40 makes both")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if len(rows) < FEWEST:
        parser.error(f"{table} has {len(rows)} networks, too few to test a predictor on a tenth; expected {FEWEST}")
    networks = [from_safetensors(options.folder / row["file"]) for row in rows]
    accuracies = torch.tensor([[float(row["accuracy"])] for row in rows])

    test = len(networks) // 10
    train = NetworkDataset(networks[test:], accuracies[test:])
    loader = DataLoader(train, batch_sampler=BucketSampler(train, 16, shuffle=True), collate_fn=collate_fn)
    space = networks[0].space.any_hidden_width()
    model = nn.Sequential(
        Standardise(networks[test:]),
        MagepEquivariant(space, 1, 16, activation="relu"),
        MagepInvariant(space, 16, 64),
        SignedLogarithm(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
        nn.Sigmoid(),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in track(range(options.epochs), "training the predictor"):
        for batch, targets in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy(model(batch.features), targets).backward()
            optimizer.step()
    with torch.no_grad():
        predicted = torch.cat([model(network) for network in networks[:test]])
    tau = kendall_tau(predicted[:, 0], accuracies[:test, 0])
    for row, guess in list(zip(rows, predicted[:, 0].tolist(), strict=False))[:5]:
        print(f"{row['file']}: predicted {guess:.3f}, true {float(row['accuracy']):.3f}")
    print(f"Kendall's tau on {test} networks that were not trained on: {tau:.3f}")
    return tau


class SignedLogarithm(nn.Module):
    """Invariants are polynomials of the weights and range over many orders of magnitude."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sign() * x.abs().log1p()


def kendall_tau(x: Tensor, y: Tensor) -> float:
    """How well x orders y, from −1 to 1."""
    concordance = ((x[:, None] - x).sign() * (y[:, None] - y).sign()).sum()
    pairs = ((x[:, None] != x).sum() * (y[:, None] != y).sum()).double().sqrt()
    return (concordance / pairs).item()


def make_networks(folder: Path, count: int, steps: int = 120) -> None:
    """Writes `count` ReLU MLPs 2-h-h-2, trained on a spiral to different accuracies, h from 4 to 16."""
    folder.mkdir(parents=True, exist_ok=True)
    angle, label = 5 * torch.rand(600, 1), torch.arange(600) % 2  # two arms, one the mirror image of the other
    points = torch.cat([angle.cos(), angle.sin()], dim=1) * (0.2 + angle / 5) * (1 - 2 * label[:, None])
    points = points + 0.03 * torch.randn_like(points)
    rows = []
    for width in track((4, 8, 12, 16), "training networks of widths 4 to 16"):
        part = count // 4
        widths = (2, width, width, 2)
        weights = [torch.randn(part, 1, n, m) * (2 / m) ** 0.5 for m, n in pairwise(widths)]
        parameters = [x.requires_grad_() for x in (*weights, *(torch.zeros(part, 1, n) for n in widths[1:]))]
        networks = WeightFeatures(parameters[:3], parameters[3:])
        rates = 10 ** (-3 * torch.rand(part))  # each network learns at its own speed, so accuracies differ
        optimizer = torch.optim.Adam(parameters, lr=0.05)
        for _ in range(steps):
            logits = run(networks, points, torch.relu)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), label.repeat(part), reduction="none")
            before = [x.detach().clone() for x in parameters]
            optimizer.zero_grad()
            loss.view(part, -1).mean(1).sum().backward()
            optimizer.step()
            with torch.no_grad():
                for x, old in zip(parameters, before, strict=True):
                    x.copy_(old + (x - old) * rates.view(-1, *(1,) * (x.dim() - 1)))
        accuracy = (run(networks, points, torch.relu).argmax(-1) == label).float().mean(1)
        files = [f"mlp_{width}_{k}.safetensors" for k in range(part)]
        to_safetensors(networks.detach(), [folder / file for file in files])
        rows += zip(files, accuracy.tolist(), strict=True)
    order = torch.randperm(len(rows)).tolist()
    with (folder / "accuracies.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "accuracy"), *(rows[k] for k in order)])


if __name__ == "__main__":
    main()
