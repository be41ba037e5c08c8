"""One layer, forward and backward, backend against backend, at the shapes people have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure import count_ops, peak_memory, set_threads, time_interleaved
from magep_fast import MagepEquivariant, MagepInvariant, WeightFeatures, WeightSpace, available_backends, use_backend


@dataclass(frozen=True)
class Shape:
    """A layer's shape: hidden networks of these widths, d = e channels, B networks."""

    name: str
    widths: tuple[int, ...]
    channels: int
    batch_size: int

    def features(self, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> WeightFeatures:
        """Networks at the scale of their own initialisation: weights of variance 1/n_(i-1), biases of variance 1."""
        size, widths = (self.batch_size, self.channels), self.widths
        features = WeightFeatures(
            (torch.randn(*size, n, m, dtype=dtype) * m**-0.5 for m, n in pairwise(widths)),
            (torch.randn(*size, n, dtype=dtype) for n in widths[1:]),
        )
        return features.map(lambda x: x.requires_grad_(requires_grad))


SHAPES = {
    "a": Shape("CNN zoo", (1, 16, 16, 16, 10), 20, 8),
    "b": Shape("SIREN, MNIST", (2, 32, 32, 1), 128, 32),
    "c": Shape("SIREN, CIFAR-10", (2, 32, 32, 3), 64, 32),
    "d": Shape("wide", (16, 256, 256, 256, 10), 16, 4),
    "e": Shape("deep", (16, *(64,) * 7, 10), 32, 8),
}
LAYERS = {"equivariant": MagepEquivariant, "invariant": MagepInvariant}


def training_pass(layer: torch.nn.Module, features: WeightFeatures, backend: str) -> Callable[[], list[torch.Tensor]]:
    """A call that runs forward and backward from fixed random output gradients: gradients of inputs and parameters."""

    def outputs() -> tuple[torch.Tensor, ...]:
        result = layer(features)
        return (result,) if isinstance(result, torch.Tensor) else result.tensors()

    with use_backend(backend), torch.random.fork_rng():
        torch.manual_seed(1)
        gradients = [torch.randn(x.shape, dtype=x.dtype) for x in outputs()]
    inputs = [*features.tensors(), *layer.parameters()]

    def run() -> list[torch.Tensor]:
        with use_backend(backend):
            y = outputs()
        # Entries no term reads (a bias of no use to the invariant layer, say) have no gradient.
        return [*y, *(g for g in torch.autograd.grad(y, inputs, gradients, allow_unused=True) if g is not None)]

    return run


def disagreement(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest error of any output or gradient, relative to the largest entry of that tensor."""
    return max(
        (
            float(((x - y).abs().max() / y.abs().max().clamp_min(1e-30)).detach())
            for x, y in zip(found, expected, strict=True)
        ),
        default=0.0,
    )


def run(arguments: argparse.Namespace) -> None:
    console = Console()
    torch.manual_seed(0)
    threads = set_threads(arguments.threads)
    backends = ["reference", *(name for name in available_backends() if name != "reference")]
    table = Table(
        title=f"One layer, forward + backward, float32, {threads} threads, {arguments.repeats} interleaved repeats"
    )
    for column in ("layer", "shape", "backend"):
        table.add_column(column)
    for column in ("median ms", "p20–p80", "speed-up", "peak MB", "memory", "ops"):
        table.add_column(column, justify="right")
    kinds = list(LAYERS)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("timing", total=len(kinds) * len(arguments.shapes) * arguments.repeats)
        try:
            for kind in kinds:
                for key in arguments.shapes:
                    shape = SHAPES[key]
                    progress.update(task, description=f"{kind} {key}")
                    features = shape.features()
                    layer = LAYERS[kind](WeightSpace(shape.widths), shape.channels, shape.channels)
                    calls = [training_pass(layer, features, backend) for backend in backends]
                    errors = [disagreement(call(), calls[0]()) for call in calls]
                    timings = time_interleaved(calls, arguments.repeats, progress=lambda: progress.advance(task))
                    memory = [peak_memory(call) for call in calls]
                    for k, backend in enumerate(backends):
                        timing, agrees = timings[k], errors[k] < 1e-3
                        table.add_row(
                            kind if k == 0 else "",
                            f"{key}: {shape.name}" if k == 0 else "",
                            backend,
                            f"{timing.p50 * 1e3:.2f}",
                            f"{timing.p20 * 1e3:.2f}–{timing.p80 * 1e3:.2f}",
                            f"{timings[0].p50 / timing.p50:.2f}×" if agrees else f"disagrees by {errors[k]:.0e}",
                            f"{memory[k] / 1e6:.1f}",
                            f"{memory[k] / memory[0]:.2f}×",
                            str(count_ops(calls[k])),
                            end_section=k == len(backends) - 1,
                        )
        except KeyboardInterrupt:
            console.print("interrupted: the finished rows follow")
    console.print(table)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="which shapes")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each backend (default 20)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.set_defaults(run=run)
