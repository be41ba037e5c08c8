"""How the cost of a layer grows with width, depth, channels and batch: time per input weight as curves."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from rich.table import Table

from benchmarks.layers import LAYERS, Shape, Subject, backends_on, disagreement
from benchmarks.measure import CPU, set_threads, time_interleaved
from benchmarks.report import append_rows, wide_console
from magep_fast import WeightSpace


@dataclass(frozen=True)
class Sweep:
    """Shapes along one axis."""

    axis: str
    values: tuple[int, ...]

    def shape(self, value: int) -> Shape:
        width, depth, channels, batch = 64, 4, 16, 4
        if self.axis == "width":
            width = value
        elif self.axis == "depth":
            depth, width = value, 32
        elif self.axis == "channels":
            channels, width = value, 32
        else:
            batch, width = value, 32
        if self.axis == "width":
            channels, batch = 8, 2
        return Shape(f"{self.axis} {value}", (4, *(width,) * (depth - 1), 4), channels, batch)


SWEEPS = (
    Sweep("width", (16, 32, 64, 128, 256, 512, 1024)),
    Sweep("depth", (2, 4, 8, 16, 32)),
    Sweep("channels", (1, 4, 16, 64, 128)),
    Sweep("batch", (1, 4, 16, 64)),
)


def measure(kind: str, sweep: Sweep, value: int, backends: list[str], seconds: float) -> list[dict[str, object]]:
    """One row per backend, with as many repeats as fit into about `seconds`."""
    torch.manual_seed(0)
    shape = sweep.shape(value)
    features = shape.features()
    layer = LAYERS[kind](WeightSpace(shape.widths), shape.channels, shape.channels)
    subjects = [Subject(layer, features, backend) for backend in backends]
    expected = subjects[0].training()
    agree = [disagreement(subject.training(), expected) < 1e-3 for subject in subjects]
    (once, *_) = time_interleaved([lambda: [subject.training() for subject in subjects]], repeats=1, warmup=1)
    timings = time_interleaved([s.training for s in subjects], min(50, max(5, int(seconds / once.p50))), warmup=1)
    weights = sum(x.numel() for x in features.tensors())
    return [
        {
            "layer": kind,
            "axis": sweep.axis,
            "value": value,
            "backend": backend,
            "p20_ms": round(timing.p20 * 1e3, 4),
            "p50_ms": round(timing.p50 * 1e3, 4),
            "p80_ms": round(timing.p80 * 1e3, 4),
            "ns_per_weight": round(timing.p50 * 1e9 / weights, 3) if right else "wrong",
        }
        for backend, timing, right in zip(backends, timings, agree, strict=True)
    ]


def plot(rows: list[dict[str, object]], path: Path) -> None:
    """Nanoseconds per input weight against each axis, a line per backend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(len(LAYERS), len(SWEEPS), figsize=(4 * len(SWEEPS), 6.4), squeeze=False)
    for r, kind in enumerate(LAYERS):
        for c, sweep in enumerate(SWEEPS):
            axes = grid[r][c]
            for backend in dict.fromkeys(str(row["backend"]) for row in rows):
                points = [
                    (row["value"], row["ns_per_weight"])
                    for row in rows
                    if (row["layer"], row["axis"], row["backend"]) == (kind, sweep.axis, backend)
                    and isinstance(row["ns_per_weight"], float)
                ]
                axes.plot(*zip(*points, strict=True), marker="o", label=backend) if points else None
            axes.set(xscale="log", yscale="log", xlabel=sweep.axis, title=f"{kind}, by {sweep.axis}")
            axes.set_xticks(sweep.values, [str(value) for value in sweep.values])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        grid[r][0].set_ylabel("ns per input weight, fwd + bwd")
    grid[0][0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def run(arguments: argparse.Namespace) -> None:
    console = wide_console()
    threads = set_threads(arguments.threads)
    backends = [name for name in backends_on(CPU) if name != "reference"]
    rows: list[dict[str, object]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("timing", total=len(LAYERS) * sum(len(sweep.values) for sweep in SWEEPS))
        try:
            for kind in LAYERS:
                for sweep in SWEEPS:
                    for value in sweep.values:
                        progress.update(task, description=f"{kind}, {sweep.axis} {value}")
                        found = measure(kind, sweep, value, backends, arguments.seconds)
                        append_rows(arguments.out / "scaling.csv", found)
                        rows += found
                        progress.advance(task)
        except KeyboardInterrupt:
            console.print("interrupted: the finished rows follow")
    table = Table(title=f"Forward + backward, float32, {threads} threads: nanoseconds per input weight")
    for column in ("layer", "axis", "value", *backends):
        table.add_column(column, justify="right")
    for k in range(0, len(rows), len(backends)):
        first = rows[k]
        cells = [str(row["ns_per_weight"]) for row in rows[k : k + len(backends)]]
        table.add_row(str(first["layer"]), str(first["axis"]), str(first["value"]), *cells)
    console.print(table)
    if rows:
        plot(rows, arguments.out / "scaling.png")
        console.print(f"rows in {arguments.out / 'scaling.csv'}, plot in {arguments.out / 'scaling.png'}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long to time each point (default 2)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/scaling"),
        help="folder for scaling.csv and scaling.png (default build/scaling)",
    )
    parser.set_defaults(run=run)
