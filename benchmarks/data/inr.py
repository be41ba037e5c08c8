"""Maker of SIRENs: one network for each image, many fitted at once.

Forward, backward and Adam are written out for batches of networks: the arithmetic of a fit is small products and sines,
and an autograd graph of them costs more than they do. Groups of networks are fitted by a thread each, as products of
this size gain little from more threads than one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.data.images import Images, read_images
from benchmarks.data.making import add_making_arguments, make
from benchmarks.data.networks import Manifest
from benchmarks.data.siren import Siren, coordinates, psnr
from magep_fast import WeightFeatures, WeightSpace

COLUMNS = {
    "label": "class of the image",
    "psnr": "peak signal-to-noise ratio of the fit in dB",
    "image": "pixels [height, width, colours], uint8",
    "index": "of the image in its file, among those for training or those for testing",
    "split": "0 training, 1 validation, 2 testing",
}
TEST_SHARE, VALIDATION_SHARE = 1 / 6, 1 / 10
AT_ONCE = 16
"""Networks fitted together by a thread: products are large enough, and activations stay in the cache."""


@dataclass(frozen=True)
class Fit:
    """How a SIREN is fitted: Adam on all pixels with a cosine schedule, again for those below `min_psnr`."""

    steps: int = 100
    learning_rate: float = 5e-3
    min_psnr: float = 28.0
    rounds: int = 5
    hidden: tuple[int, ...] = (32, 32)
    siren: Siren = field(default_factory=Siren)


def fit(images: Tensor, settings: Fit, generator: torch.Generator) -> tuple[WeightFeatures, Tensor]:
    """SIRENs of images `[N, height, width, colours]` in [0, 1], and the PSNR `[N]` of each."""
    height, width, colours = images.shape[1:]
    space = WeightSpace((2, *settings.hidden, colours))
    networks = settings.siren.initialise(space, len(images), generator)
    quality = torch.zeros(len(images))

    def fit_group(chosen: Tensor) -> None:
        for _ in range(settings.rounds):
            fitted = _descend(networks[chosen], images[chosen], settings)
            for all_networks, new in zip(networks.tensors(), fitted.tensors(), strict=True):
                all_networks[chosen] = new
            quality[chosen] = psnr(settings.siren.render(fitted, height, width), images[chosen])
            chosen = chosen[quality[chosen] < settings.min_psnr]
            if not len(chosen):
                break

    with _one_thread_each() as threads, ThreadPoolExecutor(threads) as pool:
        list(pool.map(fit_group, torch.arange(len(images)).split(AT_ONCE)))
    return networks, quality


@contextmanager
def _one_thread_each() -> Iterator[int]:
    """How many threads torch may have, all of which are the caller's meanwhile: operations take one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _descend(networks: WeightFeatures, images: Tensor, settings: Fit) -> WeightFeatures:
    """`steps` of Adam on the mean square error of all pixels. Weights are kept transposed, `[N, n_(i-1), n_i]`."""
    count, L = networks.batch_size, networks.num_layers
    omegas = settings.siren.omegas(L)
    inputs = coordinates(*images.shape[1:3]).expand(count, -1, -1)
    targets = images.flatten(1, 2) - settings.siren.offset
    start = [x for w, b in zip(networks.weights, networks.biases, strict=True) for x in (w.squeeze(1).mT, b)]
    numbers = torch.cat([x.flatten(1) for x in start], dim=1)
    gradient, mean, square = (torch.zeros_like(numbers) for _ in range(3))

    def views(rows: Tensor) -> list[Tensor]:
        parts = rows.split([x.shape[1:].numel() for x in start], dim=1)
        return [part.view(x.shape) for part, x in zip(parts, start, strict=True)]

    w, b, dw, db = *_alternate(views(numbers)), *_alternate(views(gradient))
    for step in range(1, settings.steps + 1):
        hidden, angles = [inputs], []
        for i, omega in enumerate(omegas):
            angles.append(torch.baddbmm(b[i], hidden[-1], w[i]).mul_(omega))
            hidden.append(angles[-1].sin())
        delta = torch.baddbmm(b[-1], hidden[-1], w[-1]).sub_(targets).mul_(2 / targets[0].numel())
        for i in range(L - 1, -1, -1):  # delta: gradient of the loss by W_i h_(i-1) + b_i
            dw[i].copy_(hidden[i].mT @ delta)
            db[i].copy_(delta.sum(1, keepdim=True))
            if i > 0:
                delta = (delta @ w[i].mT).mul_(angles[i - 1].cos_()).mul_(omegas[i - 1])
        mean.lerp_(gradient, 0.1)
        square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        rate = settings.learning_rate * 0.5 * (1 + math.cos(math.pi * step / (settings.steps + 1)))
        deviation = square.sqrt().mul_((1 - 0.99**step) ** -0.5).add_(1e-10)
        numbers.addcdiv_(mean, deviation, value=-rate / (1 - 0.9**step))
    return WeightFeatures((x.mT.unsqueeze(1) for x in w), b)


def _alternate(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return tensors[::2], tensors[1::2]


class SirenMaker:
    """Shards of SIRENs. Training, validation and test networks are of different images."""

    rows = "SIRENs"

    def __init__(self, images: Images, count: int, per_shard: int, seed: int, settings: Fit):
        self.images, self.per_shard, self.seed, self.settings = images, per_shard, seed, settings
        num_test = min(round(count * TEST_SHARE), len(images.test))
        num_train = count - num_test
        if num_train > len(images.train):
            most = len(images.train) + min(len(images.test), round(len(images.train) / (1 - TEST_SHARE) * TEST_SHARE))
            raise ValueError(f"{images.name} has images for {most} networks; found --count {count}")
        splits = torch.cat([torch.zeros(num_train, dtype=torch.uint8), torch.full((num_test,), 2, dtype=torch.uint8)])
        splits[: round(num_train * VALIDATION_SHARE)] = 1
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        self.splits = splits[order]
        self.index = torch.cat([torch.arange(num_train), torch.arange(num_test)])[order]
        space = WeightSpace((2, *settings.hidden, images.train.shape[-1]))
        options = {"images": images.name, "count": count, "per_shard": per_shard, "seed": seed}
        fitting = asdict(settings)
        options |= fitting.pop("siren") | fitting | {"hidden": list(settings.hidden)}
        self.manifest = Manifest(space, "sin", "inr", options, COLUMNS, -(-count // per_shard))

    def shard(self, number: int) -> tuple[WeightFeatures, dict[str, Tensor], str]:
        """Networks, columns, and what to tell about networks that were left out."""
        rows = slice(number * self.per_shard, (number + 1) * self.per_shard)
        split, index = self.splits[rows], self.index[rows]
        testing = split == 2
        images = torch.empty(len(index), *self.images.train.shape[1:], dtype=torch.uint8)
        labels = torch.empty(len(index), dtype=torch.long)
        for chosen, pixels, classes in (
            (testing, self.images.test, self.images.test_labels),
            (~testing, self.images.train, self.images.train_labels),
        ):
            images[chosen], labels[chosen] = pixels[index[chosen]], classes[index[chosen]]
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
        networks, quality = fit(images.float() / 255, self.settings, generator)
        good = quality >= self.settings.min_psnr
        left_out = int((~good).sum())
        told = f"{left_out} fits stayed below {self.settings.min_psnr:g} dB and are left out" if left_out else ""
        columns = {"label": labels, "psnr": quality, "image": images, "index": index, "split": split}
        return networks[good], {name: column[good] for name, column in columns.items()}, told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_making_arguments(parser, count=12_000, what="SIRENs", per_shard=256)
    parser.add_argument("--steps", type=int, default=Fit.steps, help="of Adam for each fit (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=Fit.learning_rate, help="of Adam (default %(default)s)")
    parser.add_argument(
        "--min-psnr",
        type=float,
        default=Fit.min_psnr,
        help="worse fits are continued, at last left out (default %(default)s)",
    )
    parser.add_argument(
        "--omega", type=float, default=Siren.omega, help="ω of the hidden layers after the first (default %(default)s)"
    )
    parser.add_argument(
        "--first-omega", type=float, default=Siren.first_omega, help="ω of the first layer (default %(default)s)"
    )
    parser.add_argument(
        "--offset", type=float, default=Siren.offset, help="added to the output to give a pixel (default %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    siren = Siren(arguments.omega, arguments.first_omega, arguments.offset)
    settings = Fit(arguments.steps, arguments.learning_rate, arguments.min_psnr, siren=siren)
    maker = SirenMaker(read_images(arguments.images), arguments.count, arguments.per_shard, arguments.seed, settings)
    make(maker, Path(arguments.out), arguments)
