"""Edit images by editing the weights of the SIRENs that hold them: a network that raises contrast without rendering.

    python -m examples.edit_siren

SIRENs 2-16-16-1 are fitted to pictures of blobs, all at once; then an equivariant network learns to change their
weights so that what they draw has its contrast raised. It is tested on SIRENs it has not seen.
"""

import argparse
from collections.abc import Sequence

import torch
from rich.progress import track
from torch import Tensor, nn

from examples.shared import Standardise, run
from magep_fast import MagepEquivariant, MonomialEquivariant, WeightFeatures, WeightSpace
from magep_fast.models import Edit
from magep_fast.permutation import LearnedScale

SPACE = WeightSpace((2, 16, 16, 1))
OMEGA = 10.0


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=160)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    axis = torch.linspace(-1, 1, 12)
    points = torch.cartesian_prod(axis, axis)
    pictures = blobs(options.networks, points)
    sirens = fit(pictures, points, options.steps)
    print(f"SIRENs fitted: mean square error {(draw(sirens, points) - pictures).square().mean():.4f}")

    target = (3 * pictures).tanh()
    test = options.networks // 5
    editor = Edit(
        nn.Sequential(
            Standardise([sirens[test:]]),
            MonomialEquivariant(SPACE, 1, 16, activation="tanh"),
            MagepEquivariant(SPACE, 16, 16, activation="tanh"),
            MonomialEquivariant(SPACE, 16, 1),
            LearnedScale(SPACE, 0.05),
        )
    )
    optimizer = torch.optim.Adam(editor.parameters(), lr=3e-3)
    for _ in track(range(options.steps), "training the editor"):
        optimizer.zero_grad()
        (draw(editor(sirens[test:]), points) - target[test:]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        before = (draw(sirens[:test], points) - target[:test]).square().mean().item()
        after = (draw(editor(sirens[:test]), points) - target[:test]).square().mean().item()
    print(f"distance to the edited pictures, on {test} SIRENs not trained on: {before:.4f} before, {after:.4f} after")
    return after / before


def blobs(count: int, points: Tensor) -> Tensor:
    """Pictures `[count, points]` with a bright and a dark blob."""
    centres = 1.2 * torch.rand(count, 2, 1, 2) - 0.6
    bumps = (-6 * (points - centres).square().sum(-1)).exp()
    return bumps[:, 0] - bumps[:, 1]


def draw(sirens: WeightFeatures, points: Tensor) -> Tensor:
    """The pictures that SIRENs hold, `[networks, points]`."""
    return run(sirens, points, torch.sin)[..., 0]


def fit(pictures: Tensor, points: Tensor, steps: int) -> WeightFeatures:
    """One SIREN for each picture, from its own random start; ω_0 is in the first weights."""
    count = len(pictures)
    first = OMEGA * (2 * torch.rand(count, 1, 16, 2) - 1) / 2
    others = [(2 * torch.rand(count, 1, n, 16) - 1) * (6 / 16) ** 0.5 for n in (16, 1)]
    biases = [0.1 * torch.randn(count, 1, n) for n in (16, 16, 1)]
    parameters = [x.requires_grad_() for x in (first, *others, *biases)]
    sirens = WeightFeatures(parameters[:3], parameters[3:])
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in track(range(2 * steps), "fitting SIRENs"):
        optimizer.zero_grad()
        (draw(sirens, points) - pictures).square().mean(1).sum().backward()
        optimizer.step()
    return sirens.detach()


if __name__ == "__main__":
    main()
