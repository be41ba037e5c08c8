"""Maker of a zoo of small CNNs: several trained at once as one grouped network, each with its own hyper-parameters.

Three 3×3 convolutions of 16 filters with stride 2, the mean over positions, a dense layer: the network of the Small CNN
Zoo (Unterthiner et al. 2020), here for images of any size and one colour.
"""

from __future__ import annotations

import argparse
import math
from copy import copy

import torch
from torch import Tensor, nn

from benchmarks.data.images import Images, read_images
from benchmarks.data.making import add_making_arguments, make
from benchmarks.data.networks import Manifest
from magep_fast import WeightFeatures, WeightSpace
from magep_fast.activations import FUNCTIONS

FILTERS, CONVOLUTIONS, KERNEL, STRIDE = 16, 3, 3, 2
SMALLEST = 15
"""Height and width of images of which three convolutions leave one position."""

BATCH = 16
CHECKPOINTS = (0.2, 0.4, 0.7, 1.0)
"""Where in a network's training its weights are kept."""

RECENT = 10
"""What is kept is the mean of a network's weights over about the last tenth (1 / RECENT) of its steps so far. Of single
steps the accuracy jumps by two points from one to the next, which weights do not show."""

OPTIMISERS = ("sgd", "adam", "rmsprop")
COLUMNS = {
    "accuracy": "on test images",
    "loss": "mean cross-entropy on the same images",
    "network": "number of the network; its checkpoints are neighbours",
    "step": "of training at this checkpoint",
    "steps": "of training in all",
    "optimiser": f"0, 1, 2 for {', '.join(OPTIMISERS)}",
    "learning_rate": "at the start; it falls to zero as a cosine",
    "init_scale": "times He's standard deviation",
    "weight_decay": "L2 penalty",
    "dropout": "probability before the dense layer",
    "fraction": "share of the training images that the network sees",
    "split": "0 training, 1 validation, 2 testing: by network, never by checkpoint",
}
SHARES = (0.7, 0.1, 0.2)


class Group:
    """CNNs that train side by side, each a row of `numbers` `[networks, …]`: its kernels `[16, 9·in]`, its dense
    weights `[classes, 16]`, its biases."""

    def __init__(self, count: int, classes: int, activation: str, scale: Tensor, generator: torch.Generator):
        self.function = FUNCTIONS[activation]
        widths = [1, *(FILTERS,) * CONVOLUTIONS]
        matrices = [(FILTERS, KERNEL**2 * n) for n in widths[:-1]] + [(classes, FILTERS)]
        gains = [2.0] * CONVOLUTIONS + [1.0]
        weights = [
            torch.randn(count, *shape, generator=generator) * (gain / shape[1]) ** 0.5 * _like(scale, 3)
            for shape, gain in zip(matrices, gains, strict=True)
        ]
        biases = [torch.zeros(count, rows) for rows, _ in matrices]
        self.shapes: list[tuple[int, ...]] = [*matrices, *((rows,) for rows, _ in matrices)]
        self.numbers = torch.cat([x.flatten(1) for x in (*weights, *biases)], dim=1).requires_grad_()

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases, as views."""
        parts = self.numbers.split([math.prod(shape) for shape in self.shapes], dim=1)
        views = [part.view(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return views[: CONVOLUTIONS + 1], views[CONVOLUTIONS + 1 :]

    def logits(self, images: Tensor, dropout: Tensor | None = None) -> Tensor:
        """`[networks, classes, batch]` of images `[batch, networks, height, width]`."""
        (*kernels, dense), (*biases, output) = self.tensors()
        x, count = images, len(self.numbers)
        for w, b in zip(kernels, biases, strict=True):
            w = w.unflatten(2, (KERNEL, KERNEL, -1)).permute(0, 1, 4, 2, 3)
            x = self.function(nn.functional.conv2d(x, w.flatten(0, 1), b.flatten(), stride=STRIDE, groups=count))
        pooled = x.mean((2, 3)).view(-1, count, FILTERS).permute(1, 2, 0)
        if dropout is not None:
            pooled = pooled * dropout
        return torch.baddbmm(output.unsqueeze(-1), dense, pooled)

    def features(self) -> WeightFeatures:
        """The networks as they are now, in weight space."""
        (*kernels, dense), biases = ([x.detach().clone() for x in xs] for xs in self.tensors())
        convolutions = [w.unflatten(2, (KERNEL**2, -1)).transpose(1, 2).contiguous() for w in kernels]
        return WeightFeatures([*convolutions, dense.unsqueeze(1)], [b.unsqueeze(1) for b in biases])


class Optimiser:
    """SGD with momentum, Adam or RMSprop, another for each network, with its own learning rate and weight decay.

    Args:
        parameters: `[networks, …]`, a row per network.
    """

    def __init__(self, parameters: Tensor, kind: Tensor, learning_rate: Tensor, weight_decay: Tensor):
        self.parameters = parameters
        self.plain = _like(kind == OPTIMISERS.index("sgd"), 2)
        self.rate, self.decay = _like(learning_rate, 2), _like(weight_decay, 2)
        self.momentum = _like(torch.where(kind == OPTIMISERS.index("rmsprop"), 0.0, 0.9), 2)
        self.mean, self.square = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self.count = 0

    @torch.no_grad()
    def step(self, gradient: Tensor, factor: float) -> None:
        """One step at `factor` times the learning rate."""
        self.count += 1
        g = gradient + self.decay * self.parameters
        # Of SGD the sum of past gradients, of the others their mean, free of bias.
        self.mean.mul_(self.momentum).addcmul_(g, torch.where(self.plain, 1.0, 1 - self.momentum))
        self.square.mul_(0.99).addcmul_(g, g, value=0.01)
        deviation = (self.square / (1 - 0.99**self.count)).sqrt_().add_(1e-8)
        unbiased = self.mean / (1 - self.momentum**self.count)
        self.parameters -= self.rate * factor * torch.where(self.plain, self.mean, unbiased / deviation)


class ZooMaker:
    """Shards of CNNs, all checkpoints of a network in the same one."""

    rows = "checkpoints"

    def __init__(
        self,
        images: Images,
        activation: str,
        count: int,
        per_shard: int,
        seed: int,
        steps: tuple[int, int],
        test_images: int,
    ):
        images = images.grey()
        if min(images.train.shape[1:3]) < SMALLEST:
            size = tuple(images.train.shape[1:3])
            raise ValueError(f"{images.name} has images of {size}; expected {SMALLEST} × {SMALLEST} at least")
        pixels = images.train.float() / 255
        mean, deviation = pixels.mean(), pixels.std()
        chosen = _balanced(images.test_labels, test_images)
        self.train, self.test = (
            (x.float() / 255 - mean).div(deviation).squeeze(-1)  # [images, height, width]
            for x in (images.train, images.test[chosen])
        )
        self.train_labels, self.test_labels = images.train_labels, images.test_labels[chosen]
        self.classes = int(images.train_labels.max()) + 1
        self.activation, self.per_shard, self.seed, self.steps = activation, per_shard, seed, steps
        self.count = count
        space = WeightSpace((1, *(FILTERS,) * CONVOLUTIONS, self.classes), (*(KERNEL**2,) * CONVOLUTIONS, 1))
        options = {
            "images": images.name,
            "count": count,
            "per_shard": per_shard,
            "seed": seed,
            "steps": list(steps),
            "batch": BATCH,
            "test_images": len(self.test),
        }
        self.manifest = Manifest(space, activation, "zoo", options, COLUMNS, -(-count // per_shard))

    def shard(self, number: int) -> tuple[WeightFeatures, dict[str, Tensor], str]:
        """All checkpoints that are finite, their columns, and what to tell about networks that diverged."""
        first = number * self.per_shard
        count = min(self.per_shard, self.count - first)
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
        drawn = self._draw(count, generator)
        low, high = self.steps
        steps = round(math.exp(_uniform(1, math.log(low), math.log(high), generator).item()))
        group = Group(count, self.classes, self.activation, drawn["init_scale"], generator)
        optimiser = Optimiser(group.numbers, drawn["optimiser"], drawn["learning_rate"], drawn["weight_decay"])
        averaged = copy(group)
        averaged.numbers = group.numbers.detach().clone()
        dropout = drawn["dropout"][:, None, None]
        keep = {max(1, round(share * steps)) for share in CHECKPOINTS}
        seen = (drawn["fraction"] * len(self.train)).long().clamp_min(BATCH)
        offset = torch.randint(len(self.train), (count,), generator=generator)
        features: list[WeightFeatures] = []
        columns: dict[str, list[Tensor]] = {name: [] for name in COLUMNS}
        split = self._splits()[first : first + count]
        for step in range(1, steps + 1):
            picked = (torch.rand(count, BATCH, generator=generator) * seen.unsqueeze(1)).long()
            index = (offset.unsqueeze(1) + picked) % len(self.train)  # a window of the images for each network
            kept = (torch.rand(count, FILTERS, BATCH, generator=generator) >= dropout) / (1 - dropout)
            logits = group.logits(self.train[index.T], kept)
            losses = nn.functional.cross_entropy(logits, self.train_labels[index], reduction="sum")
            (gradient,) = torch.autograd.grad(losses / BATCH, group.numbers)
            optimiser.step(gradient, 0.5 * (1 + math.cos(math.pi * (step - 1) / steps)))
            averaged.numbers.lerp_(group.numbers.detach(), RECENT / (step + RECENT - 1))
            if step in keep:
                accuracy, loss = self._evaluate(averaged)
                features.append(averaged.features())
                constant = {"step": torch.full((count,), step), "steps": torch.full((count,), steps)}
                known = drawn | constant | {"accuracy": accuracy, "loss": loss, "split": split}
                known["network"] = torch.arange(first, first + count)
                for name, values in known.items():
                    columns[name].append(values)
        order = torch.arange(len(keep) * count).view(len(keep), count).T.flatten()  # network by network
        networks = WeightFeatures.cat(features)[order]
        joined = {name: torch.cat(values)[order] for name, values in columns.items()}
        finite = (
            torch.stack([x.flatten(1).isfinite().all(1) for x in networks.tensors()]).all(0) & joined["loss"].isfinite()
        )
        lost = int((~finite).sum())
        told = f"{lost} checkpoints of networks that diverged are left out" if lost else ""
        return networks[finite], {name: column[finite] for name, column in joined.items()}, told

    def _draw(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Hyper-parameters of each network, `[count]`."""
        kind = torch.randint(len(OPTIMISERS), (count,), generator=generator)
        sgd = _log_uniform(count, 1e-3, 3e-2, generator)
        adaptive = _log_uniform(count, 2e-4, 5e-3, generator)
        decays = torch.rand(count, generator=generator) < 0.5
        drops = torch.rand(count, generator=generator) < 0.5
        return {
            "optimiser": kind,
            "learning_rate": torch.where(kind == OPTIMISERS.index("sgd"), sgd, adaptive),
            "init_scale": _log_uniform(count, 0.2, 1.2, generator),
            "weight_decay": torch.where(decays, _log_uniform(count, 1e-5, 3e-2, generator), 0.0),
            "dropout": torch.where(drops, _uniform(count, 0.0, 0.5, generator), 0.0),
            "fraction": _log_uniform(count, 0.005, 1.0, generator),
        }

    def _splits(self) -> Tensor:
        """Of all networks."""
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed))
        bounds = torch.tensor(SHARES).cumsum(0)[:-1] * self.count
        return torch.bucketize(order, bounds.round().long(), right=True).to(torch.uint8)

    @torch.no_grad()
    def _evaluate(self, group: Group) -> tuple[Tensor, Tensor]:
        """Accuracy and mean cross-entropy of each network on the test images."""
        count = len(group.numbers)
        right, loss = torch.zeros(count), torch.zeros(count)
        for images, labels in zip(self.test.split(64), self.test_labels.split(64), strict=True):
            logits = group.logits(images.unsqueeze(1).expand(-1, count, -1, -1))
            right += (logits.argmax(1) == labels).sum(-1)
            loss += nn.functional.cross_entropy(logits, labels.expand(count, -1), reduction="none").sum(-1)
        return right / len(self.test), loss / len(self.test)


def _balanced(labels: Tensor, count: int) -> Tensor:
    """Indices of as many images of each class, `count` in all if there are: so that all networks that know a single
    answer are equally good."""
    each = min(count // int(labels.max() + 1), int(labels.bincount().min()))
    return torch.cat([(labels == label).nonzero().flatten()[:each] for label in labels.unique()])


def _like(per_network: Tensor, dimensions: int) -> Tensor:
    """`[networks, 1, …]`."""
    return per_network.view(-1, *(1,) * (dimensions - 1))


def _uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator)


def _log_uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return _uniform(count, math.log(low), math.log(high), generator).exp()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_making_arguments(parser, count=1024, what="CNNs", per_shard=16)
    parser.add_argument("--activation", choices=("relu", "tanh"), default="relu", help="of the CNNs (default relu)")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=(200, 600),
        metavar=("LEAST", "MOST"),
        help="of training (default 200 600)",
    )
    parser.add_argument("--test-images", type=int, default=2000, help="that accuracies are measured on (default 2000)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    maker = ZooMaker(
        read_images(arguments.images),
        arguments.activation,
        arguments.count,
        arguments.per_shard,
        arguments.seed,
        tuple(arguments.steps),
        arguments.test_images,
    )
    make(maker, arguments.out, arguments)
