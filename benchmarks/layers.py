"""One layer, forward and backward, implementation against implementation, at the shapes people have."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from benchmarks.floor import Machine, equivariant_flops, floor_seconds, invariant_flops
from benchmarks.measure import CPU, count_ops, finisher, peak_memory, set_threads, time_interleaved
from benchmarks.report import append_rows, wide_console
from magep_fast import MagepEquivariant, MagepInvariant, WeightFeatures, WeightSpace, use_backend
from magep_fast.ops.backends import backends

COMPILED = "torch.compile(reference)"


@dataclass(frozen=True)
class Shape:
    """A batch of networks of these widths, and a layer with as many channels out as in."""

    name: str
    widths: tuple[int, ...]
    channels: int
    batch_size: int

    def features(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> WeightFeatures:
        """Networks at the scale of their own initialisation: weights of variance 1/n_(i-1), biases of variance 1."""
        size, widths = (self.batch_size, self.channels), self.widths
        features = WeightFeatures(
            ((torch.randn(*size, n, m, dtype=dtype) * m**-0.5).to(device) for m, n in pairwise(widths)),
            (torch.randn(*size, n, dtype=dtype).to(device) for n in widths[1:]),
        )
        return features.map(Tensor.requires_grad_)


SHAPES = {
    "a": Shape("CNN zoo", (1, 16, 16, 16, 10), 20, 8),
    "b": Shape("SIREN, MNIST", (2, 32, 32, 1), 128, 32),
    "c": Shape("SIREN, CIFAR-10", (2, 32, 32, 3), 64, 32),
    "d": Shape("wide", (16, 256, 256, 256, 10), 16, 4),
    "e": Shape("deep", (16, *(64,) * 7, 10), 32, 8),
}
LAYERS: dict[str, type[MagepEquivariant] | type[MagepInvariant]] = {
    "equivariant": MagepEquivariant,
    "invariant": MagepInvariant,
}
FLOPS = {"equivariant": equivariant_flops, "invariant": invariant_flops}


class Subject:
    """A layer in one implementation with inputs and fixed output gradients, ready to be called."""

    def __init__(self, layer: nn.Module, features: WeightFeatures, implementation: str):
        self.backend = "reference" if implementation == COMPILED else implementation
        self.layer = torch.compile(layer, fullgraph=True) if implementation == COMPILED else layer
        self.features, self.inputs = features, [*features.tensors(), *layer.parameters()]
        generator = torch.Generator().manual_seed(1)
        self.gradients = [torch.randn(y.shape, dtype=y.dtype, generator=generator).to(y) for y in self.forward()]

    def forward(self) -> tuple[Tensor, ...]:
        with use_backend(self.backend):
            result = self.layer(self.features)
        return (result,) if isinstance(result, Tensor) else result.tensors()

    def inference(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.forward()

    def training(self) -> list[Tensor]:
        """Outputs, then the gradients of inputs and parameters."""
        y = self.forward()
        # The bias of a layer that no term reads has no gradient.
        gradients = torch.autograd.grad(y, self.inputs, self.gradients, allow_unused=True)
        return [*y, *(g for g in gradients if g is not None)]


def disagreement(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of any output or gradient, relative to the largest entry of that tensor."""
    with torch.no_grad():
        errors = [
            float((x - y).abs().max() / y.abs().max().clamp_min(1e-30)) for x, y in zip(found, expected, strict=True)
        ]
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)


def measure(
    kind: str,
    shape: Shape,
    implementations: list[str],
    repeats: int,
    machine: Machine,
    tick: Callable[[], object],
    device: torch.device = CPU,
) -> list[dict[str, object]]:
    """One row per implementation, the first being the one others are compared with."""
    torch.manual_seed(0)
    torch.compiler.reset()  # graphs of other shapes count towards dynamo's limit
    features, finish = shape.features(device=device), finisher(device)
    layer = LAYERS[kind](WeightSpace(shape.widths), shape.channels, shape.channels).to(device)
    subjects = [Subject(layer, features, name) for name in implementations]
    expected = subjects[0].training()
    errors = [disagreement(subject.training(), expected) for subject in subjects]
    forward = time_interleaved([subject.inference for subject in subjects], max(3, repeats // 4), finish=finish)
    both = time_interleaved([subject.training for subject in subjects], repeats, progress=tick, finish=finish)
    flops = FLOPS[kind](shape.widths, shape.channels, shape.channels, shape.batch_size)
    least = floor_seconds(
        machine,
        flops,
        sum(x.nbytes for x in features.tensors()),
        sum(y.nbytes for y in subjects[0].inference()),
        sum(p.nbytes for p in layer.parameters()),
    )
    rows: list[dict[str, object]] = []
    for name, subject, error, inference, training in zip(implementations, subjects, errors, forward, both, strict=True):
        memory = peak_memory(subject.training, device)
        rows.append(
            {
                "layer": kind,
                "shape": shape.name,
                "widths": "-".join(map(str, shape.widths)),
                "channels": shape.channels,
                "batch": shape.batch_size,
                "implementation": name,
                "forward_ms": round(inference.p50 * 1e3, 4),
                "p20_ms": round(training.p20 * 1e3, 4),
                "p50_ms": round(training.p50 * 1e3, 4),
                "p80_ms": round(training.p80 * 1e3, 4),
                # No speed-up is reported for a wrong answer.
                "speed_up": round(both[0].p50 / training.p50, 3) if error < 1e-3 else f"wrong by {error:.0e}",
                "peak_mb": round(memory / 1e6, 3),
                "ops": count_ops(subject.training) if name != COMPILED else "",
                "times_floor": round(training.p50 / least, 3),
                "gflops": round(3 * flops / training.p50 / 1e9, 2),
            }
        )
    return rows


def run(arguments: argparse.Namespace) -> None:
    console = wide_console()
    threads = set_threads(arguments.threads)
    device = torch.device(arguments.device)
    implementations = ["reference", *(name for name in backends_on(device) if name != "reference")]
    for backend in backends():
        reason = backend.missing()
        if reason is not None and backend.unsupported(device, torch.float32) is None:
            console.print(f"without {backend.name}: {reason}")
    if arguments.compile:
        implementations.insert(1, COMPILED)
    machine = Machine.measure(device=device)
    where = f"{threads} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    table = Table(
        title=f"One layer, forward + backward, float32, {where}, {arguments.repeats} interleaved repeats",
        caption=(
            f"floor: {machine.flops / 1e9:.0f} GFLOP/s (large torch.mm; one thread {machine.one_thread / 1e9:.0f}), "
            f"copies at {machine.warm_bytes / 1e9:.1f} GB/s into warm and {machine.fresh_bytes / 1e9:.1f} GB/s into "
            "fresh memory, measured in this run"
        ),
    )
    for column in ("layer", "shape", "implementation"):
        table.add_column(column)
    for column in ("forward ms", "fwd+bwd ms", "p20–p80", "speed-up", "peak MB", "memory", "ops", "× floor"):
        table.add_column(column, justify="right")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("timing", total=len(arguments.layers) * len(arguments.shapes) * arguments.repeats)
        try:
            for kind in arguments.layers:
                for key in arguments.shapes:
                    progress.update(task, description=f"{kind} {key}")
                    rows = measure(
                        kind,
                        SHAPES[key],
                        implementations,
                        arguments.repeats,
                        machine,
                        lambda: progress.advance(task),
                        device,
                    )
                    _add_to(table, key, rows)
                    if arguments.out:
                        append_rows(arguments.out / "layers.csv", rows)
        except KeyboardInterrupt:
            console.print("interrupted: the finished rows follow")
    console.print(table)


def backends_on(device: torch.device) -> list[str]:
    """The backends that can run here on float32 tensors of a device, but for those that only tests ask for."""
    return [
        backend.name
        for backend in backends()
        if backend.missing() is None and backend.unsupported(device, torch.float32) is None
        if backend.automatic or backend.name == "reference"
    ]


def _add_to(table: Table, key: str, rows: list[dict[str, object]]) -> None:
    for k, row in enumerate(rows):
        speed_up = row["speed_up"]
        table.add_row(
            str(row["layer"]) if k == 0 else "",
            f"{key}: {row['shape']}" if k == 0 else "",
            str(row["implementation"]),
            f"{row['forward_ms']:.2f}",
            f"{row['p50_ms']:.2f}",
            f"{row['p20_ms']:.2f}–{row['p80_ms']:.2f}",
            f"{speed_up:.2f}×" if isinstance(speed_up, float) else str(speed_up),
            f"{row['peak_mb']:.1f}",
            f"{row['peak_mb'] / rows[0]['peak_mb']:.2f}×",  # type: ignore[operator]
            str(row["ops"]),
            f"{row['times_floor']:.2f}",
            end_section=k == len(rows) - 1,
        )


def _shapes_help() -> str:
    shapes = (f"{key} {shape.name} ({'-'.join(map(str, shape.widths))})" for key, shape in SHAPES.items())
    return "which shapes (default all): " + ", ".join(shapes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS), help="which layers")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help=_shapes_help())
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each implementation (default 20)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--compile", action="store_true", help=f"also {COMPILED}; compiling takes minutes")
    parser.add_argument("--device", default="cpu", help='where to run: "cpu" (default) or "cuda"')
    parser.add_argument("--out", type=Path, help="folder for layers.csv, to which rows are appended (default: none)")
    parser.set_defaults(run=run)
