"""Editing the image that a SIREN holds by changing its weights.

The metric is the mean square error of the edited SIREN's image against the edited image, pixels in [0, 1].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.data import Networks
from benchmarks.data.siren import Siren, UnitForm
from benchmarks.peers.mlp import Flatten, numbers
from benchmarks.tasks.task import BuildSystem, Task
from magep_fast import WeightFeatures, WeightSpace
from magep_fast.convert import from_nfn
from magep_fast.models import Edit, StyleEditing, mlp
from magep_fast.permutation import LearnedScale

Change = Literal["dilate", "contrast"]
SIZES = {1: 28, 3: 32}
"""Height and width of images that a data set does not come with, by their number of colours."""

CONTRAST = 1.5


def inr_edit(change: Change, form: UnitForm) -> Task:
    """The task; models change networks in this form, and all images have the size of the targets."""

    def errors(output: WeightFeatures, targets: Tensor) -> Tensor:
        return (form.render(output, *targets.shape[1:3]) - targets).square().flatten(1).mean(1)

    return Task(
        name="inr-edit",
        activation="sin",
        metric="MSE",
        higher_is_better=False,
        systems=SYSTEMS,
        prepare=lambda networks: form.to(networks.features),
        targets=lambda networks: edited(original(networks), change),
        loss=lambda output, targets: errors(output, targets).mean(),
        predictions=errors,
        score=lambda predictions, targets: float(predictions.mean()),
    )


def original(networks: Networks) -> Tensor:
    """The images `[N, height, width, colours]` in [0, 1] that networks were fitted to, or else that they hold."""
    if "image" in networks.columns:
        return networks.columns["image"].float() / 255
    size = SIZES[networks.space.n_out]
    with torch.no_grad():
        return Siren.of(networks.options).render(networks.features, size, size).clamp(0, 1)


def edited(images: Tensor, change: Change) -> Tensor:
    """Dilated: the maximum over 3×3 pixels. Contrast: 1.5 times the distance from the image's mean, in [0, 1]."""
    if change == "dilate":
        return nn.functional.max_pool2d(images.permute(0, 3, 1, 2), 3, 1, 1).permute(0, 2, 3, 1)
    mean = images.mean((1, 2, 3), keepdim=True)
    return (mean + CONTRAST * (images - mean)).clamp(0, 1)


class FlatEdit(nn.Module):
    """An MLP on all numbers in a row."""

    def __init__(self, space: WeightSpace, hidden: int):
        super().__init__()
        self.net = nn.Sequential(Flatten(), mlp(numbers(space), hidden, hidden, numbers(space)))

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        tensors = features.tensors()
        parts = self.net(features).split([x.shape[1:].numel() for x in tensors], dim=1)
        change = [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
        return WeightFeatures(change[: features.num_layers], change[features.num_layers :])


class FromNfn(nn.Module):
    """Features of nfn as WeightFeatures."""

    def forward(self, features: Any) -> WeightFeatures:
        return from_nfn(features)


def _mlp(space: WeightSpace, hidden: int = 1000, start_scale: float = 0.01) -> nn.Module:
    return Edit(nn.Sequential(FlatEdit(space, hidden), LearnedScale(space, start_scale)))


def _nfn(
    kind: str,
    space: WeightSpace,
    np_channels: int = 128,
    np_layers: int = 3,
    fourier: int = 256,
    fourier_scale: float = 3.0,
    start_scale: float = 0.01,
) -> nn.Module:
    """NP or HNP of Zhou et al. 2023: Fourier features, positions for NP, layers with ReLU, one to a single channel."""
    from benchmarks.peers.nfn_layers import Chain, EncodedLayers

    parts = EncodedLayers(kind, space, np_channels, np_layers, fourier, fourier_scale, layer_positions=False)
    change = Chain(space, [*parts.body, parts.layer(np_channels, 1), FromNfn()])
    return Edit(nn.Sequential(*parts.encoders, change, LearnedScale(space, start_scale)))


SYSTEMS: dict[str, BuildSystem] = {
    "MLP": lambda space, settings: _mlp(space, **settings),
    "NP": lambda space, settings: _nfn("np", space, **settings),
    "HNP": lambda space, settings: _nfn("hnp", space, **settings),
    "Monomial-NFN": lambda space, settings: StyleEditing(terms="linear", **settings).build(space),
    "MAGEP": lambda space, settings: StyleEditing(**settings).build(space),
}


def unedited(networks: Networks, change: Change) -> float:
    """The error of networks that nothing is done to."""
    targets = edited(original(networks), change)
    shown = Siren.of(networks.options).render(networks.features, *targets.shape[1:3])
    return float((shown - targets).square().mean())


def draw_grid(path: Path, model: nn.Module, networks: Networks, change: Change, form: UnitForm) -> None:
    """A PNG of the images that networks hold, that they hold when edited, and that they should hold: a column each."""
    import matplotlib.pyplot as plt

    targets, given = edited(original(networks), change), form.to(networks.features)
    with torch.no_grad():
        model.eval()
        rows = [form.render(x, *targets.shape[1:3]) for x in (given, model(given))]
    rows.append(targets)
    figure, axes = plt.subplots(3, len(networks), figsize=(len(networks), 3.3), squeeze=False)
    for label, images, line in zip(("before", "after", "target"), rows, axes, strict=True):
        for image, ax in zip(images.clamp(0, 1).squeeze(-1).cpu(), line, strict=True):
            ax.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
        line[0].set_ylabel(label)
    figure.tight_layout(pad=0.2)
    figure.savefig(path, dpi=100)
    plt.close(figure)
