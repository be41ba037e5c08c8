"""The paper's efficiency tables: every system trained on CNNs of the zoo's shape, and MAGEP on SIRENs."""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from benchmarks.data.stand_ins import CNN, make_accuracies, make_classes, make_networks, read_zoo
from benchmarks.layers import disagreement
from benchmarks.measure import count_ops, peak_memory, set_threads, timing
from benchmarks.peers import PAPER, PaperRow, Subset, peers
from benchmarks.report import append_rows, check_columns, environment, wide_console
from benchmarks.tables_report import Row, describe, draw, number, write_markdown
from benchmarks.training import Dataset, Trainer, keep_freed_memory
from magep_fast import WeightSpace
from magep_fast.models import CIFAR10, MNIST, CnnGeneralization, Config
from magep_fast.ops.backends import choose_backend

REFERENCE, COMPILED, FUSED = "MAGEP-reference", "MAGEP-compiled", "MAGEP-fused"
TOLERANCE = 1e-3
NOT_IN_PAPER = PaperRow()
QUICK_NETWORKS = 512
COMPARED_STEPS = 5
CHANGE_TOLERANCE = 0.02
"""How far what these steps change in the parameters may be from what those of the reference do: rounding decides the
direction in which Adam moves parameters that have next to no gradient."""


@dataclass(frozen=True)
class Entry:
    """A row to be: what to build, and the paper's figures for it.

    Args:
        backend: of the MAGEP layers, if it has any.
        compiled: run it through torch.compile.
        slow_to_build: left out of a quick run unless it is asked for by name.
    """

    name: str
    build: Callable[[WeightSpace], nn.Module]
    paper: PaperRow = NOT_IN_PAPER
    backend: str = ""
    compiled: bool = False
    slow_to_build: bool = False


@dataclass(frozen=True)
class Work:
    """A table: the networks, and how long the paper trains on them.

    Args:
        subset: of the CNN zoo, for the tables that have all systems; None for those of MAGEP alone.
    """

    title: str
    space: WeightSpace
    config: Config
    networks: int
    batch_size: int
    steps: int
    loss: Callable[[Tensor, Tensor], Tensor]
    subset: Subset | None = None

    def entries(self) -> list[Entry]:
        """The rows: rivals first, MAGEP in its literal form, the same compiled, and fused."""
        literal = replace(self.config, backend="reference").build
        if self.subset is None:
            return [
                Entry(REFERENCE, literal, backend="reference"),
                Entry(FUSED, self.config.build, backend=self.config.backend),
            ]
        paper = PAPER[self.subset]["MAGEP"]
        return [
            *(Entry(peer.name, peer.build, peer.paper) for peer in peers(self.subset)),
            Entry(REFERENCE, literal, paper, "reference"),
            # Minutes to compile: a quick run does so once.
            Entry(COMPILED, literal, paper, "reference", compiled=True, slow_to_build=self.subset != "relu"),
            Entry(FUSED, self.config.build, paper, self.config.backend),
        ]

    def made_networks(self, count: int) -> Dataset:
        networks = make_networks(self.space, count)
        return Dataset(networks, make_accuracies(networks) if self.subset else make_classes(networks))


def cnn_zoo(subset: Subset, networks: int) -> Work:
    steps = -(-networks // 8) * 50
    config = CnnGeneralization(activation=subset)
    name = {"relu": "ReLU", "tanh": "Tanh"}[subset]
    title = f"CNN generalisation, {name} subset: {networks} networks, batch 8, 50 epochs"
    return Work(title, CNN, config, networks, 8, steps, nn.functional.binary_cross_entropy, subset)


def siren(name: str, outputs: int, config: Config) -> Work:
    title = f"{name} SIRENs 2-32-32-{outputs}: MAGEP without Fourier features, batch 32, 200000 steps"
    return Work(title, WeightSpace((2, 32, 32, outputs)), config, 45_000, 32, 200_000, nn.functional.cross_entropy)


WORKS = {
    "relu": cnn_zoo("relu", 6050),
    "tanh": cnn_zoo("tanh", 5949),
    "mnist": siren("MNIST", 1, MNIST),
    "cifar10": siren("CIFAR-10", 3, CIFAR10),
}


class Subject:
    """An entry built, with a training loop around it and what was measured so far."""

    def __init__(self, work: Work, entry: Entry, data: Dataset, device: torch.device):
        torch.manual_seed(0)  # the three forms of MAGEP start from the same parameters
        model = entry.build(work.space).to(device)
        self.parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if entry.compiled:
            model.compile(dynamic=False)
        self.entry, self.device = entry, device
        self.trainer = Trainer(model, data, work.loss, work.batch_size)
        self.seconds: list[float] = []
        self.failure = ""

    def outputs_and_gradients(self, batch_size: int) -> list[Tensor]:
        """Of the first networks; dropout, if any, drops the same for everyone."""
        trainer = self.trainer
        networks, targets = trainer.data.batch(torch.arange(batch_size, device=self.device))
        torch.manual_seed(1)
        output = trainer.model(networks)
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        return [output, *torch.autograd.grad(trainer.loss(output, targets), trained)]

    def all_parameters(self) -> Tensor:
        """A copy of what is trained, in one tensor."""
        return torch.cat([p.detach().flatten() for p in self.trainer.model.parameters() if p.requires_grad])

    def losses(self, steps: int) -> list[Tensor]:
        """Of further steps of training; dropout, if any, drops the same for everyone."""
        torch.manual_seed(1)
        return list(self.trainer.run(steps))

    def seconds_per_step(self, steps: int) -> float:
        """The mean of the next steps, taken as a whole run takes them."""
        start = time.perf_counter()
        self.trainer.run(steps)
        self._synchronise()
        return (time.perf_counter() - start) / steps

    def take_turn(self, lasting: float = 0.1) -> None:
        """Steps for about this many seconds, at most ten, after one that brings the model's data into cache."""
        first = self.seconds_per_step(1)
        steps = min(10, int(lasting / first))
        self.seconds.append(self.seconds_per_step(steps) if steps else first)

    def peak_megabytes(self) -> float:
        """What torch's allocator holds at the peak of a step beyond what it held before."""
        if self.device.type != "cuda":
            return peak_memory(partial(self.trainer.run, 1)) / 1e6
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.trainer.run(1)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 1e6

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Run:
    """One call of the command: settings, where rows go, and those of them that are finished."""

    mode: str
    device: torch.device
    threads: int
    repeats: int
    models: list[str]
    zoo: Path | None
    out: Path
    console: Console
    progress: Progress
    id: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    rows: list[Row] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.out / "tables.csv"

    def inputs(self, work: Work) -> str:
        return f"zoo {self.zoo.name}" if self.zoo and work.subset else "made here"

    def finished(self, table: str) -> dict[str, Row]:
        return {str(row["model"]): row for row in self.rows if row["table"] == table and row["status"] == "ok"}

    def wanted(self, table: str) -> list[Entry]:
        """The entries of a table that are asked for and not finished, and the reference, which others need."""
        entries = [
            entry
            for entry in WORKS[table].entries()
            if (entry.name in self.models if self.models else self.mode == "full" or not entry.slow_to_build)
        ]
        left = [entry for entry in entries if entry.name not in self.finished(table)]
        others = any(entry.name != REFERENCE for entry in left)
        return [entry for entry in entries if entry in left or (entry.name == REFERENCE and others)]

    def data(self, work: Work) -> Dataset:
        count = work.networks if self.mode == "full" else min(work.networks, QUICK_NETWORKS)
        if self.zoo is None or work.subset is None:
            return work.made_networks(count).to(self.device)
        networks, accuracies = read_zoo(self.zoo, work.subset, count)
        networks.check(work.space, channels=1)
        return Dataset(networks, accuracies).to(self.device)

    def row(self, table: str, entry: Entry, status: str, found: Row) -> Row:
        """A row with every column; those not in `found` are empty."""
        work, paper = WORKS[table], entry.paper
        measured = ("repeats", "p20_ms", "p50_ms", "p80_ms", "run_s", "speed_up", "peak_mb", "process_mb")
        return {
            "run": self.id,
            "mode": self.mode,
            "table": table,
            "model": entry.name,
            "backend": entry.backend and choose_backend(entry.backend, self.device, torch.float32).name,
            "status": status,
            **{column: found.get(column, "") for column in (*measured, "parameters", "ops", "error")},
            "paper_parameters": "" if paper.parameters is None else round(paper.parameters * 1e6),
            "paper_a100_run_s": "" if paper.seconds is None else paper.seconds,
            "paper_a100_mb": "" if paper.megabytes is None else paper.megabytes,
            "inputs": self.inputs(work),
            "batch": work.batch_size,
            "steps": work.steps,
            "device": str(self.device),
        }

    def keep(self, rows: list[Row]) -> None:
        """Appends rows to the CSV; they take the place of unfinished ones."""
        append_rows(self.path, rows)
        new = {(row["table"], row["model"]) for row in rows}
        self.rows = [row for row in self.rows if (row["table"], row["model"]) not in new] + rows


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"failed: {type(error).__name__}: {lines[0]}"


def process_peak(table: str, model: str, device: str, threads: int) -> float:
    """Megabytes that a process training this row holds at its peak, Python and torch included.

    On a GPU, what torch's allocator reserves there.
    """
    command = [sys.executable, "-m", "benchmarks.process_peak", table, model, device, str(threads)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"a process of its own ended with code {result.returncode}: {reason[-1]}")
    return float(result.stdout.split()[-1])


def process_peaks(run: Run, table: str, entries: list[Entry], tick: Callable[[], object]) -> dict[str, float | str]:
    """Peak megabytes by name, or why a process that trains this model alone ended: what kills it does not kill us."""

    def measure(entry: Entry) -> float | str:
        try:
            return round(process_peak(table, entry.name, str(run.device), run.threads), 1)
        except Exception as error:
            return reason(error)
        finally:
            tick()

    pool = ThreadPoolExecutor(2)
    try:
        return dict(zip([entry.name for entry in entries], pool.map(measure, entries), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def disagreements(subjects: Iterable[Subject]) -> dict[str, float]:
    """How far outputs and gradients of each form of MAGEP are from those of the reference, at the start, and the losses
    and parameters of its first steps, which it makes here. All forms start from the same parameters and meet the same
    batches. A form that fails at a step remembers why, and is not compared."""
    forms = {s.entry.name: s for s in subjects if s.entry.name in (REFERENCE, COMPILED, FUSED)}
    if REFERENCE not in forms:
        return {}
    size = forms[REFERENCE].trainer.batch_size
    found = {name: subject.outputs_and_gradients(size) for name, subject in forms.items()}
    change: dict[str, Tensor] = {}

    def train(subject: Subject) -> None:
        before = subject.all_parameters()
        found[subject.entry.name] += subject.losses(COMPARED_STEPS)
        change[subject.entry.name] = subject.all_parameters() - before

    guarded(forms.values(), train)
    if forms[REFERENCE].failure:
        return {}
    errors = {}
    for name in change:
        right = (change[name] - change[REFERENCE]).norm() < CHANGE_TOLERANCE * change[REFERENCE].norm()
        errors[name] = disagreement(found[name], found[REFERENCE]) if right or name == REFERENCE else math.inf
    return errors


def speed_up(name: str, reference: float | None, own: float, error: float | None) -> float | str:
    """The reference's time over one's own. None is reported for a form of MAGEP that is wrong or was not compared."""
    if reference is None:
        return ""
    if name in (COMPILED, FUSED) and (error is None or not error < TOLERANCE):
        return "not compared" if error is None else f"wrong by {error:.0e}"
    return round(reference / own, 3)


def prepare(run: Run, table: str, entry: Entry, data: Dataset, peak: float | str | None) -> Subject | Row:
    """The entry built and warmed up, or its row if that fails."""
    if isinstance(peak, str):
        return run.row(table, entry, peak, {})
    try:
        subject = Subject(WORKS[table], entry, data, run.device)
        subject.outputs_and_gradients(WORKS[table].batch_size)  # compiles what there is to compile
        return subject
    except Exception as error:
        return run.row(table, entry, reason(error), {})


def guarded(subjects: Iterable[Subject], action: Callable[[Subject], object]) -> None:
    """The action for each subject in turn; one that fails is left out from then on, and remembers why."""
    for subject in subjects:
        try:
            if not subject.failure:
                action(subject)
        except Exception as error:
            subject.failure = reason(error)


def found_in(subject: Subject, peak: float | str | None) -> Row:
    """What is known of a subject after its steps were timed. One that does not train has no time worth reporting."""
    loss = subject.trainer.run(1).item()
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss} after {len(subject.seconds)} timed turns")
    measured = timing(subject.seconds)
    return {
        "repeats": len(subject.seconds),
        "p20_ms": round(measured.p20 * 1e3, 4),
        "p50_ms": round(measured.p50 * 1e3, 4),
        "p80_ms": round(measured.p80 * 1e3, 4),
        "peak_mb": round(subject.peak_megabytes(), 3),
        "process_mb": "" if peak is None else peak,
        "parameters": subject.parameters,
        "ops": "" if subject.entry.compiled else count_ops(partial(subject.trainer.run, 1)),
    }


def run_quick(run: Run, table: str) -> None:
    """Steps of all systems in turn, rounds of them; medians, and the whole run projected from them."""
    work, entries = WORKS[table], run.wanted(table)
    if not entries:
        return
    # Compiling takes minutes, so the compiled form is not made a second time in a process of its own.
    alone = [entry for entry in entries if not entry.compiled]
    task = run.progress.add_task(f"{table}: memory", total=len(alone) + len(entries) + run.repeats)

    def tick() -> None:
        run.progress.advance(task)

    subjects: list[Subject] = []
    rows: list[Row] = []
    peaks: dict[str, float | str] = {}
    errors: dict[str, float] = {}
    rounds, interrupted = 0, False
    try:
        data = run.data(work)
        peaks = process_peaks(run, table, alone, tick)
        for entry in entries:
            run.progress.update(task, description=f"{table}: {entry.name}")
            made = prepare(run, table, entry, data, peaks.get(entry.name))
            subjects.append(made) if isinstance(made, Subject) else rows.append(made)
            tick()
        errors = disagreements(subjects)
        run.progress.update(task, description=f"{table}: timing")
        guarded(subjects, lambda subject: subject.seconds_per_step(1))  # Adam makes its state
        for _ in range(run.repeats):
            guarded(subjects, Subject.take_turn)
            rounds += 1
            tick()
    except KeyboardInterrupt:
        interrupted = True
    medians = {s.entry.name: timing(s.seconds).p50 for s in subjects if s.seconds and not s.failure}
    found: dict[str, Row] = {}

    def note(subject: Subject) -> None:
        if subject.seconds:
            found[subject.entry.name] = found_in(subject, peaks.get(subject.entry.name))

    guarded(subjects, note)
    for subject in subjects:
        name = subject.entry.name
        if subject.failure:
            rows.append(run.row(table, subject.entry, subject.failure, {}))
        elif name in found:
            found[name] |= {
                "run_s": round(medians[name] * work.steps, 4),
                "speed_up": speed_up(name, medians.get(REFERENCE), medians[name], errors.get(name)),
                "error": f"{errors[name]:.1e}" if name in errors else "",
            }
            status = f"interrupted after {rounds} of {run.repeats} rounds" if interrupted else "ok"
            rows.append(run.row(table, subject.entry, status, found[name]))
    finished = run.finished(table)
    run.keep([row for row in rows if row["model"] not in finished])
    run.progress.remove_task(task)
    if interrupted:
        raise KeyboardInterrupt


def run_full(run: Run, table: str) -> None:
    """The whole run of each system, one after the other, the reference first."""
    entries = sorted(run.wanted(table), key=lambda entry: entry.name != REFERENCE)
    left = [entry for entry in entries if entry.name not in run.finished(table)]
    data = run.data(WORKS[table]) if left else None
    for entry in left:
        assert data is not None
        task = run.progress.add_task(f"{table}: {entry.name}", total=WORKS[table].steps)
        try:
            row = train_fully(run, table, entry, data, partial(run.progress.advance, task))
        except Exception as error:
            row = run.row(table, entry, reason(error), {})
        run.keep([row])
        run.progress.remove_task(task)


def train_fully(run: Run, table: str, entry: Entry, data: Dataset, advance: Callable[[float], object]) -> Row:
    """The row of one system after all the steps of the paper's run; `advance` is told how many more are done."""
    work = WORKS[table]
    peak = round(process_peak(table, entry.name, str(run.device), run.threads), 1)
    subject = Subject(work, entry, data, run.device)
    error = None
    if entry.name in (COMPILED, FUSED):
        literal = next(other for other in work.entries() if other.name == REFERENCE)
        error = disagreements([Subject(work, literal, data, run.device), subject]).get(entry.name)
    for size in {work.batch_size, len(data) % work.batch_size} - {0}:
        subject.outputs_and_gradients(size)  # compiling is not part of the run
    start = time.perf_counter()
    for done in range(0, work.steps, 50):
        steps = min(50, work.steps - done)
        subject.seconds.append(subject.seconds_per_step(steps))
        advance(steps)
    seconds = time.perf_counter() - start
    finished = run.finished(table).get(REFERENCE)
    reference = seconds if entry.name == REFERENCE else number(finished["run_s"]) if finished else None
    return run.row(
        table,
        entry,
        "ok",
        found_in(subject, peak)
        | {
            "run_s": round(seconds, 4),
            "speed_up": speed_up(entry.name, reference, seconds, error),
            "error": "" if error is None else f"{error:.1e}",
        },
    )


def resume(run: Run) -> None:
    """Takes over the id and the finished rows of the last run with the same settings, if there is one."""
    if not run.path.exists():
        return
    with run.path.open(newline="") as file:
        rows: list[Row] = [dict(row) for row in csv.DictReader(file)]
    here = environment()
    same = {"mode": run.mode, "device": str(run.device), **{key: here[key] for key in ("cpu", "threads", "torch")}}
    rows = [
        row
        for row in rows
        if row["table"] in WORKS
        and all(row[key] == value for key, value in same.items())
        and row["inputs"] == run.inputs(WORKS[str(row["table"])])
    ]
    if not rows:
        return
    run.id = str(rows[-1]["run"])
    run.rows = [row for row in rows if row["run"] == run.id and row["status"] == "ok"]


def main(arguments: argparse.Namespace) -> None:
    console = wide_console()
    keep_freed_memory()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\._inductor")  # of torch about itself
    tables = arguments.tables or (["relu", "tanh"] if arguments.full else list(WORKS))
    names = list(dict.fromkeys(entry.name for table in tables for entry in WORKS[table].entries()))
    unknown = [name for name in arguments.models or [] if name not in names]
    if unknown:
        raise SystemExit(
            f"no model {', '.join(unknown)} in the tables {', '.join(tables)}; there are {', '.join(names)}"
        )
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        run = Run(
            mode="full" if arguments.full else "quick",
            device=torch.device(arguments.device),
            threads=set_threads(arguments.threads),
            repeats=arguments.repeats,
            models=arguments.models or [],
            zoo=arguments.zoo,
            out=arguments.out,
            console=console,
            progress=progress,
        )
        check_columns(
            run.path, run.row(tables[0], WORKS[tables[0]].entries()[0], "", {})
        )  # before anything is measured
        if arguments.resume:
            resume(run)
        try:
            for table in tables:
                if not console.is_terminal:  # where no bar is drawn
                    console.print(f"{table}: {', '.join(entry.name for entry in run.wanted(table))}")
                (run_full if arguments.full else run_quick)(run, table)
        except KeyboardInterrupt:
            console.print("interrupted: the finished rows follow; --resume measures the others")
    order = [(table, entry.name) for table, work in WORKS.items() for entry in work.entries()]
    run.rows.sort(key=lambda row: order.index((str(row["table"]), str(row["model"]))))
    for table in tables:
        rows = [row for row in run.rows if row["table"] == table]
        if rows:
            console.print(describe(WORKS[table].title, rows, environment()))
    if run.rows:
        titles = {key: work.title for key, work in WORKS.items()}
        write_markdown(run.out / "tables.md", titles, run.rows, environment())
        plots = draw(run.out, titles, run.rows)
        console.print(
            f"rows in {run.path}, the tables in {run.out / 'tables.md'}, plots in {', '.join(map(str, plots))}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="time steps and project the whole run (default)")
    length.add_argument("--full", action="store_true", help="train as long as the paper does; hours for some models")
    parser.add_argument("--tables", nargs="+", choices=list(WORKS), help="which (default: all; with --full the CNNs)")
    parser.add_argument("--models", nargs="+", help="which rows (default: all)")
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of timed steps (default 15)")
    parser.add_argument("--zoo", type=Path, help="folder of a data set of the Small CNN Zoo; without it, made networks")
    parser.add_argument("--resume", action="store_true", help="go on with the last run in the folder")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/tables"),
        help="folder for CSV, Markdown and plots (default build/tables)",
    )
    parser.set_defaults(run=main)
