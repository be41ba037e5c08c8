"""python -m benchmarks train: one task, one data set, some models and seeds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.commands import add_commands
from benchmarks.data import Source
from benchmarks.data.siren import Siren, UnitForm
from benchmarks.measure import set_threads
from benchmarks.peers import SUBSETS
from benchmarks.report import append_rows, wide_console
from benchmarks.tasks import paper
from benchmarks.tasks.configs import CONFIGS, read_config, settings
from benchmarks.tasks.generalization import generalization
from benchmarks.tasks.inr_classify import inr_classify
from benchmarks.tasks.inr_edit import Change, draw_grid, inr_edit, unedited
from benchmarks.tasks.loop import Precision, Run, World
from benchmarks.tasks.task import Task
from benchmarks.training import keep_freed_memory

Row = dict[str, Any]
PICTURES = 10
TYPICAL = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    texts = {
        "generalization": "predict the accuracy of CNNs",
        "inr-classify": "classify the images of SIRENs",
        "inr-edit": "edit the images of SIRENs",
    }
    for name, task in add_commands(parser, "task", texts).items():
        task.add_argument(
            "--data", type=Path, required=True, help="made by `data`, a Small CNN Zoo, or folders of SIRENs"
        )
        task.add_argument("--model", nargs="+", default=["MAGEP"], help="systems to train (default MAGEP), or `all`")
        task.add_argument(
            "--config", default="paper", help=f"{', '.join(CONFIGS[name])} or a JSON file (default paper)"
        )
        task.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each (default 0)")
        task.add_argument("--steps", type=int, help="in place of the config's")
        task.add_argument("--learning-rate", type=float, help="in place of the config's")
        task.add_argument(
            "--out",
            type=Path,
            default=Path("runs"),
            help="a folder per run; a run that is there goes on (default runs)",
        )
        task.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default cpu")
        task.add_argument("--precision", choices=get_args(Precision), help="of autocast (default float32)")
        task.add_argument("--threads", type=int, help="of torch")
        task.set_defaults(run=run, augment=0, activation=None, change=None)
        if name == "generalization":
            task.add_argument("--activation", choices=("relu", "tanh"), help="which networks of a zoo that has both")
            task.add_argument("--augment", type=int, default=0, choices=range(5), help="i: copies scaled by U[1, 10^i]")
            task.epilog = "--model 'MAGEP: <terms>' trains a row of the ablation; `ablation` stands for all of them."
        if name == "inr-edit":
            task.add_argument(
                "--change", choices=get_args(Change), help="default: dilate grey images, contrast of others"
            )


def make_task(arguments: argparse.Namespace, source: Source) -> Task:
    if arguments.task == "generalization":
        for subset in SUBSETS:
            if source.activation == subset:
                return generalization(subset, arguments.augment)
        raise ValueError(f"{source.folder} holds {source.activation} networks; generalization is about relu and tanh")
    if source.activation != "sin":
        raise ValueError(f"{source.folder} holds {source.activation} networks; {arguments.task} is about SIRENs")
    form = unit_form(source)
    return inr_classify(form) if arguments.task == "inr-classify" else inr_edit(arguments.change, form)


def unit_form(source: Source) -> UnitForm:
    """Fitted to the first training networks, which every process reads."""
    typical = source.read("train", 0, min(TYPICAL, source.count("train"))).features
    return UnitForm.of(Siren.of(source.options), typical)


def paper_figures(task: Task, source: Source, arguments: argparse.Namespace) -> paper.Figures:
    """The paper's figures that stand beside ours; of another image set there are none."""
    if task.name == "generalization":
        return paper.GENERALIZATION.get((task.activation, arguments.augment), {})
    if task.name == "inr-classify":
        return paper.CLASSIFICATION.get(paper.image_set(str(source.options.get("images", source.folder.name))), {})
    return paper.EDITING[arguments.change]


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=wide_console(), transient=True, disable=quiet) as progress:
        yield progress


def run(arguments: argparse.Namespace) -> None:
    set_threads(arguments.threads)
    keep_freed_memory()
    world = World.join(arguments.device)
    try:
        train(arguments, world)
        world.wait()
    finally:
        World.leave()


def train(arguments: argparse.Namespace, world: World) -> list[Row]:
    """Every model with every seed; rows go to results.csv, a table of means to the screen."""
    source = Source(arguments.data, arguments.activation)
    if arguments.task == "inr-edit" and arguments.change is None:
        arguments.change = "dilate" if source.space.n_out == 1 else "contrast"
    task = make_task(arguments, source)
    config = read_config(arguments.task, arguments.config)
    rows: list[Row] = []
    with progress_bar(quiet=world.rank > 0) as progress:
        for system in chosen_systems(arguments.model, task):
            for seed in arguments.seeds:
                changes = {key: getattr(arguments, key) for key in ("steps", "learning_rate", "precision")}
                folder = run_folder(arguments, source, system, seed)
                one = Run(task, system, source, settings(config, system, **changes), seed, world, folder)
                finished = (folder / "result.json").exists()
                row = one.train(progress) | {"augment": arguments.augment, "change": arguments.change or ""}
                if world.rank == 0 and task.name == "inr-edit":
                    networks = source.read("test", 0, min(PICTURES, source.count("test")))
                    draw_grid(folder / "edited.png", one.model.to("cpu"), networks, arguments.change, unit_form(source))
                rows.append(row)
                if world.rank == 0 and not finished:
                    append_rows(arguments.out / "results.csv", [row])
    if world.rank == 0:
        show(rows, task, paper_figures(task, source, arguments))
        if task.name == "inr-edit":
            wide_console().print(f"unedited: MSE {unedited(source.read('test'), arguments.change):.5f}")
    return rows


def run_folder(arguments: argparse.Namespace, source: Source, system: str, seed: int) -> Path:
    """Where a run leaves its files."""
    kind = f"-{arguments.change}" if arguments.change else f"-augment{arguments.augment}" if arguments.augment else ""
    name = "".join(c if c.isalnum() or c in "-+" else "_" for c in system)
    return arguments.out / f"{arguments.task}{kind}" / source.folder.name / name / f"seed{seed}"


def chosen_systems(names: list[str], task: Task) -> list[str]:
    rows = [name for name in task.systems if ":" not in name]
    groups = {"all": rows, "ablation": [name for name in task.systems if ":" in name]}
    chosen = [system for name in names for system in groups.get(name, [name])]
    unknown = [name for name in chosen if name not in task.systems]
    if unknown or not chosen:
        raise ValueError(
            f"{task.name} has no model {', '.join(unknown)}; choose of {', '.join([*task.systems, *groups])}"
        )
    return chosen


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    x = torch.tensor(values, dtype=torch.float64)
    return float(x.mean()), float(x.std()) if len(values) > 1 else 0.0


def show(rows: list[Row], task: Task, figures: paper.Figures) -> None:
    """The paper's table with ours beside it."""
    table = Table("model", f"{task.metric}, test", "seeds", "the paper's", "parameters", "steps", title=task.name)
    for system in dict.fromkeys(row["model"] for row in rows):
        of_system = [row for row in rows if row["model"] == system]
        mean, deviation = mean_and_deviation([row["test"] for row in of_system])
        beside = figures.get(system)
        table.add_row(
            system,
            f"{mean:.4f}" + (f" ± {deviation:.4f}" if len(of_system) > 1 else ""),
            str(len(of_system)),
            "–" if beside is None else f"{beside[0]:g}" + (f" ± {beside[1]:g}" if beside[1] is not None else ""),
            f"{of_system[0]['parameters']:,}",
            str(of_system[0]["steps"]),
        )
    if figures:
        table.caption = "the paper's are of its own networks and training"
    wide_console().print(table)
