"""python -m tests.soak --minutes 30: trains with ever other shapes, dtypes and numbers of threads, and shows whether
memory stays where it was after warming up. `make soak` calls it."""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import random
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from torch import nn

from benchmarks.report import wide_console
from magep_fast import MagepEquivariant, MagepInvariant, MonomialEquivariant, Stack, WeightFeatures, WeightSpace
from tests.helpers import random_features

DEPTH, N_IN, N_OUT, TAPS = 4, 3, 5, (9, 9, 1, 1)
MOST_WIDTH, MOST_BATCH, MOST_THREADS, CHANNELS = 96, 48, 4, 12
MOST_GROWTH = 0.02
"""Of the memory at the end of warming up, that may be added until the end: the sizes drawn differ from step to step."""


@dataclass(frozen=True)
class Sample:
    """Seconds since the start, and megabytes that the process holds."""

    seconds: float
    megabytes: float


@dataclass(frozen=True)
class Report:
    """What a soak saw: the samples are those after warming up."""

    steps: int
    samples: list[Sample]
    finite: bool

    def growth(self) -> float:
        """Memory of the last quarter of the time over that of the first, less one: medians, as single samples jump."""
        quarter = max(1, len(self.samples) // 4)
        first, last = (sorted(x.megabytes for x in part) for part in (self.samples[:quarter], self.samples[-quarter:]))
        return last[len(last) // 2] / first[len(first) // 2] - 1

    def is_flat(self) -> bool:
        return self.growth() <= MOST_GROWTH

    def is_good(self) -> bool:
        return self.finite and self.is_flat()


class Network(nn.Module):
    """All layers of this package, for networks of any hidden widths."""

    def __init__(self) -> None:
        super().__init__()
        space = WeightSpace((N_IN, *(None,) * (DEPTH - 1), N_OUT), TAPS)
        plain = space.with_taps(1)
        self.layers = Stack(
            MonomialEquivariant(space, 1, CHANNELS, activation="tanh"),
            MagepEquivariant(plain, CHANNELS, CHANNELS, activation="sin"),
            MagepEquivariant(plain, CHANNELS, CHANNELS, activation="tanh", share_Wb=True),
            MagepInvariant(plain, CHANNELS, 4),
        )

    def forward(self, features: WeightFeatures) -> torch.Tensor:
        return self.layers(features)


def resident_megabytes() -> float:
    """What the process holds, once the allocator has given back to the system what was freed."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def soak(minutes: float, warm_up: float, seed: int = 0, progress: Progress | None = None) -> Report:
    """Trains for so many minutes, of which the first `warm_up` are not judged, and samples memory once a second."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    models = {dtype: Network().to(dtype) for dtype in (torch.float32, torch.float64)}
    optimisers = {dtype: torch.optim.Adam(model.parameters(), 1e-4) for dtype, model in models.items()}
    task = progress.add_task("soak", total=60 * minutes) if progress is not None else None
    samples, steps, finite, start, sampled = [], 0, True, time.monotonic(), 0.0
    try:
        while (elapsed := time.monotonic() - start) < 60 * minutes:
            torch.set_num_threads(draw.randint(1, MOST_THREADS))
            dtype, precision = draw.choice(
                [(torch.float32, None), (torch.float64, None), (torch.float32, torch.bfloat16)]
            )
            widths = (N_IN, *(draw.randint(1, MOST_WIDTH) for _ in range(DEPTH - 1)), N_OUT)
            features = random_features(WeightSpace(widths, TAPS), 1, draw.randint(1, MOST_BATCH), dtype)
            with torch.autocast("cpu", precision, enabled=precision is not None):
                loss = models[dtype](features).float().square().mean()
            optimisers[dtype].zero_grad()
            loss.backward()
            optimisers[dtype].step()
            steps, finite = steps + 1, finite and bool(loss.isfinite())
            if elapsed >= 60 * warm_up and elapsed - sampled >= 1:
                sampled = elapsed
                samples.append(Sample(elapsed, resident_megabytes()))
            if progress is not None and task is not None:
                held = f", {samples[-1].megabytes:.0f} MB" if samples else ""
                progress.update(task, completed=elapsed, description=f"step {steps}{held}")
    except KeyboardInterrupt:
        print("stopped; judged by what there is so far", file=sys.stderr)
    finally:
        torch.set_num_threads(threads)
    return Report(steps, samples, finite)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition(":")[2])
    parser.add_argument("--minutes", type=float, default=30, help="of this piece (default 30)")
    parser.add_argument(
        "--warm-up",
        type=float,
        default=3,
        help="minutes that are not judged: workspaces grow to the largest shapes (default 3)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of shapes and numbers; pieces want different ones")
    parser.add_argument("--log", type=Path, help="JSON lines, to which this piece is appended")
    arguments = parser.parse_args()
    console = wide_console()
    with Progress(console=console, transient=True) as progress:
        report = soak(arguments.minutes, arguments.warm_up, arguments.seed, progress)
    if not report.samples:
        sys.exit("stopped while warming up")
    first, last = report.samples[0], report.samples[-1]
    console.print(
        f"{report.steps} steps in {last.seconds / 60:.1f} minutes, all {'finite' if report.finite else 'NOT FINITE'}: "
        f"{first.megabytes:.0f} MB after warming up, {last.megabytes:.0f} MB at the end, "
        f"{max(x.megabytes for x in report.samples):.0f} MB at most; first to last quarter {report.growth():+.2%}"
    )
    if arguments.log is not None:
        with arguments.log.open("a") as file:
            samples = [(round(x.seconds), round(x.megabytes, 1)) for x in report.samples]
            file.write(json.dumps({"steps": report.steps, "growth": report.growth(), "samples": samples}) + "\n")
    sys.exit(0 if report.is_good() else f"memory grew by more than {MOST_GROWTH:.0%}, or a loss was not finite")


if __name__ == "__main__":
    main()
