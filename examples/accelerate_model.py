"""Make an existing model fast with one line: accelerate(model).

    python -m examples.accelerate_model

The model is built from the MAGEP authors' layers, of which examples.authors_layers is a stand-in with the same names
and equations. With the authors' package installed, import the layers from there: nothing else changes.
"""

import statistics
import time

import torch
from torch import nn

from examples.authors_layers import HNPSLinear, HNPSMixerInv, HNPSMixerLinear, NetworkSpec, TupleOp, WeightSpaceFeatures
from magep_fast import accelerate, load_authors_state_dict, to_authors_state_dict

WIDTHS = (1, 16, 16, 16, 10)


def build() -> nn.Module:
    """The authors' predictor of CNN accuracies with a small head: logits, for 3×3 convolutions and a dense layer."""
    networks = NetworkSpec.of(WIDTHS, [(3, 3), (3, 3), (3, 3), ()])
    features = NetworkSpec.of(WIDTHS)
    return nn.Sequential(
        HNPSLinear(networks, features, in_channels=1, out_channels=20),
        HNPSMixerLinear(features, in_channels=20, out_channels=20),
        TupleOp(nn.ReLU()),
        HNPSMixerInv(features, in_channels=20, out_channels=20),
        nn.Linear(20, 1),
    )


def main() -> float:
    torch.manual_seed(0)
    model = build()
    for parameter in model.parameters():
        parameter.data.mul_(0.1)
    networks = WeightSpaceFeatures(
        [0.1 * torch.randn(8, 1, n, m, 3, 3) for m, n in ((1, 16), (16, 16), (16, 16))]
        + [0.2 * torch.randn(8, 1, 10, 16)],
        [torch.randn(8, 1, n) for n in WIDTHS[1:]],
    )
    before = model(networks)

    report = accelerate(model, copy=True)  # the one line; copy=False changes the model in place

    print(report)
    after = report.model(networks)
    difference = ((after - before).norm() / before.norm()).item()
    old, new = step_times([model, report.model], networks)
    print(f"relative difference {difference:.1e}; forward + backward {old:.1f} ms, now {new:.1f} ms: {old / new:.1f}×")

    # Checkpoints of the old model go into the new one, and back.
    load_authors_state_dict(report.model, model.state_dict())
    build().load_state_dict(to_authors_state_dict(report.model))
    return difference


def step_times(models: list[nn.Module], networks: WeightSpaceFeatures, repeats: int = 20) -> list[float]:
    """Median milliseconds of a forward and backward pass of each model, in turn."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(repeats + 2):
        for model, found in zip(models, times, strict=True):
            start = time.perf_counter()
            model(networks).sum().backward()
            found.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(found[2:]) for found in times]


if __name__ == "__main__":
    main()
