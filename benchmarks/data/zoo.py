"""Maker of a zoo of small CNNs: several trained at once as one grouped network, each with its own hyper-parameters.

Three 3×3 convolutions of 16 filters with stride 2, the mean over positions, a dense layer: the network of the Small CNN
Zoo (Unterthiner et al. 2020), here for images of any size and one colour.
"""

from __future__ import annotations

import argparse
import math

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

BATCH = 32
CHECKPOINTS = (0.1, 0.3, 0.6, 1.0)
"""Where in a network's training its weights are kept."""

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
    """CNNs that train side by side: kernels `[networks, 16, in, 3, 3]`, dense weights `[networks, 16, classes]`."""

    def __init__(
        self, count: int, colours: int, classes: int, activation: str, scale: Tensor, generator: torch.Generator
    ):
        self.count, self.function = count, FUNCTIONS[activation]
        widths = [colours, *(FILTERS,) * CONVOLUTIONS]
        self.weights = [
            torch.randn(count, FILTERS, n, KERNEL, KERNEL, generator=generator) * (2 / (KERNEL**2 * n)) ** 0.5
            for n in widths[:-1]
        ]
        self.weights.append(torch.randn(count, FILTERS, classes, generator=generator) * FILTERS**-0.5)
        self.biases = [torch.zeros(count, FILTERS) for _ in range(CONVOLUTIONS)] + [torch.zeros(count, classes)]
        for w in self.weights:
            w.mul_(_like(scale, w)).requires_grad_()
        for b in self.biases:
            b.requires_grad_()

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    def logits(self, images: Tensor, dropout: Tensor | None = None) -> Tensor:
        """`[networks, batch, classes]` of images `[batch, networks·colours, height, width]`."""
        x = images
        for w, b in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = nn.functional.conv2d(x, w.flatten(0, 1), b.flatten(), stride=STRIDE, groups=self.count)
            x = self.function(x)
        pooled = x.mean((2, 3)).view(len(images), self.count, FILTERS).transpose(0, 1)
        if dropout is not None:
            pooled = pooled * dropout
        return torch.baddbmm(self.biases[-1].unsqueeze(1), pooled, self.weights[-1])

    def features(self) -> WeightFeatures:
        """The networks as they are now, in weight space."""
        convolutions = [w.detach().flatten(3).permute(0, 3, 1, 2).contiguous() for w in self.weights[:-1]]
        dense = self.weights[-1].detach().mT.unsqueeze(1).contiguous()
        return WeightFeatures([*convolutions, dense], [b.detach().clone().unsqueeze(1) for b in self.biases])


class Optimiser:
    """SGD with momentum, Adam or RMSprop, another for each network, with its own learning rate and weight decay."""

    def __init__(self, parameters: list[Tensor], kind: Tensor, learning_rate: Tensor, weight_decay: Tensor):
        self.parameters, self.kind, self.rate, self.decay = parameters, kind, learning_rate, weight_decay
        self.momentum = torch.where(kind == OPTIMISERS.index("rmsprop"), 0.0, 0.9)
        self.means = [torch.zeros_like(p) for p in parameters]
        self.squares = [torch.zeros_like(p) for p in parameters]
        self.count = 0

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...], factor: float) -> None:
        """One step at `factor` times the learning rate."""
        self.count += 1
        for p, g, mean, square in zip(self.parameters, gradients, self.means, self.squares, strict=True):
            momentum, plain = _like(self.momentum, p), _like(self.kind == OPTIMISERS.index("sgd"), p)
            g = g + _like(self.decay, p) * p
            # Of SGD the sum of past gradients, of the others their mean, free of bias.
            mean.mul_(momentum).add_(torch.where(plain, g, (1 - momentum) * g))
            square.mul_(0.99).addcmul_(g, g, value=0.01)
            deviation = (square / (1 - 0.99**self.count)).sqrt_().add_(1e-8)
            unbiased = mean / (1 - momentum**self.count)
            p.sub_(_like(self.rate, p) * factor * torch.where(plain, mean, unbiased / deviation))


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
            (x.float() / 255 - mean).div(deviation).permute(0, 3, 1, 2).contiguous()
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
        group = Group(count, 1, self.classes, self.activation, drawn["init_scale"], generator)
        optimiser = Optimiser(group.parameters, drawn["optimiser"], drawn["learning_rate"], drawn["weight_decay"])
        keep = {max(1, round(share * steps)) for share in CHECKPOINTS}
        seen = (drawn["fraction"] * len(self.train)).long().clamp_min(BATCH)
        offset = torch.randint(len(self.train), (count,), generator=generator)
        features: list[WeightFeatures] = []
        columns: dict[str, list[Tensor]] = {name: [] for name in COLUMNS}
        split = self._splits()[first : first + count]
        for step in range(1, steps + 1):
            picked = (torch.rand(BATCH, count, generator=generator) * seen).long()
            index = (offset + picked) % len(self.train)  # [batch, networks], a window of the images for each network
            dropped = torch.rand(count, BATCH, FILTERS, generator=generator) < drawn["dropout"][:, None, None]
            dropout = (~dropped).float() / (1 - drawn["dropout"])[:, None, None]
            logits = group.logits(self.train[index].squeeze(2), dropout)
            losses = nn.functional.cross_entropy(
                logits.flatten(0, 1), self.train_labels[index.T].flatten(), reduction="sum"
            )
            gradients = torch.autograd.grad(losses / BATCH, group.parameters)
            optimiser.step(gradients, 0.5 * (1 + math.cos(math.pi * (step - 1) / steps)))
            if step in keep:
                accuracy, loss = self._evaluate(group)
                features.append(group.features())
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
        sgd = _log_uniform(count, 5e-4, 5e-2, generator)
        adaptive = _log_uniform(count, 1e-4, 1e-2, generator)
        decays = torch.rand(count, generator=generator) < 0.5
        drops = torch.rand(count, generator=generator) < 0.5
        return {
            "optimiser": kind,
            "learning_rate": torch.where(kind == OPTIMISERS.index("sgd"), sgd, adaptive),
            "init_scale": _log_uniform(count, 0.2, 1.5, generator),
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
        right, loss = torch.zeros(group.count), torch.zeros(group.count)
        for images, labels in zip(self.test.split(128), self.test_labels.split(128), strict=True):
            logits = group.logits(images.expand(-1, group.count, -1, -1))
            right += (logits.argmax(-1) == labels).sum(-1)
            losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.repeat(group.count), reduction="none")
            loss += losses.view(group.count, -1).sum(-1)
        return right / len(self.test), loss / len(self.test)


def _balanced(labels: Tensor, count: int) -> Tensor:
    """Indices of as many images of each class, `count` in all if there are: so that all networks that know a single
    answer are equally good."""
    each = min(count // int(labels.max() + 1), int(labels.bincount().min()))
    return torch.cat([(labels == label).nonzero().flatten()[:each] for label in labels.unique()])


def _like(per_network: Tensor, x: Tensor) -> Tensor:
    return per_network.view(-1, *(1,) * (x.dim() - 1))


def _uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator)


def _log_uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return _uniform(count, math.log(low), math.log(high), generator).exp()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_making_arguments(parser, count=1024, what="CNNs", per_shard=32)
    parser.add_argument("--activation", choices=("relu", "tanh"), default="relu", help="of the CNNs (default relu)")
    parser.add_argument("--steps", type=int, nargs=2, default=(200, 600), metavar=("LEAST", "MOST"), help="of training")
    parser.add_argument("--test-images", type=int, default=3000, help="that accuracies are measured on")
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
