"""The training loop of the tasks: one process or several, stopped and resumed at will, the same numbers every time.

Training networks are dealt into lanes. Each batch takes equally many from every lane, in an order that follows from the
seed, the lane and the epoch alone. A process owns some of the lanes and reads nothing else, so the batches are the same
however many processes share them, and a run that goes on after step t needs nothing but t to know what comes next.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.data import DataError, Networks, Source
from benchmarks.data.networks import write_atomically
from benchmarks.measure import CPU
from benchmarks.tasks.task import Task
from benchmarks.training import Dataset
from magep_fast import WeightFeatures

LANES = 8
"""Lanes of a batch, or fewer if the batch has no such divisor: how many processes may share a run."""

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Settings:
    """How a model is trained.

    Args:
        steps: batches in all.
        batch_size: over all processes.
        learning_rate: of AdamW.
        schedule: "constant", or "cosine" to zero after `warmup` steps of linear growth.
        evaluate_every: steps between evaluations on the validation split, which are checkpoints too.
        weight_decay: of AdamW, times the learning rate; with 0 it is Adam.
        weight_noise: standard deviation of the factors around 1 by which every weight and bias of a training batch is
            multiplied; a factor does not care how its weight is scaled.
        patience: evaluations without a better one after which to stop; None for never.
        clip: the largest norm of the gradient, which is shortened to it; None for no bound.
        precision: of autocast; parameters stay in float32.
        model: settings of the model that differ from its defaults, the paper's.
    """

    steps: int
    batch_size: int
    learning_rate: float
    evaluate_every: int
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = 0
    weight_decay: float = 0.0
    weight_noise: float = 0.0
    patience: int | None = None
    clip: float | None = None
    precision: Precision = "float32"
    model: dict[str, Any] = field(default_factory=dict)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        growth = min(1.0, (step + 1) / (self.warmup + 1))
        if self.schedule == "constant":
            return self.learning_rate * growth
        done = max(0, step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * growth * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class World:
    """The processes that share a run: one, or those of torchrun."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @staticmethod
    def join(device: str) -> World:
        """As the environment says: gloo between CPUs, NCCL between GPUs."""
        if "RANK" not in os.environ:
            return World(device=torch.device(device))
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        local = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
        return World(distributed.get_rank(), distributed.get_world_size(), torch.device(local))

    @staticmethod
    def leave() -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def wait(self) -> None:
        """For all processes, before they leave: nobody closes a connection that another still uses."""
        if self.size > 1:
            distributed.barrier()

    def mean(self, x: Tensor) -> Tensor:
        """Over all processes."""
        if self.size > 1:
            distributed.all_reduce(x)
        return x / self.size

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all processes, one process after the other."""
        if self.size == 1:
            return x
        parts: list[Any] = [None] * self.size
        distributed.all_gather_object(parts, x.cpu())
        return torch.cat(parts)


class Lanes:
    """The lanes of the training split that belong to this process, and their batches."""

    def __init__(self, source: Source, task: Task, settings: Settings, world: World, seed: int):
        self.seed = seed
        self.lanes = math.gcd(settings.batch_size, LANES)
        if self.lanes % world.size:
            raise ValueError(
                f"a batch of {settings.batch_size} can be shared by {self.lanes} processes or a divisor of that; "
                f"found {world.size}. Choose a batch size that is a multiple of the number of processes"
            )
        self.per_lane = settings.batch_size // self.lanes
        count, own = source.count("train"), self.lanes // world.size
        first = world.rank * own
        self.own = range(first, first + own)
        self.data = []
        for lane in self.own:
            block = source.read("train", lane * count // self.lanes, (lane + 1) * count // self.lanes)
            self.data.append(dataset(block, task, seeded(seed, 1, lane), world.device))
        smallest = count // self.lanes * (2 if task.augment else 1)
        self.batches_per_epoch = smallest // self.per_lane
        if not self.batches_per_epoch:
            raise DataError(f"{source.folder} has {count} networks for training, fewer than one batch")
        self._orders: tuple[int, list[Tensor]] = (-1, [])

    def batch(self, step: int) -> tuple[WeightFeatures, Tensor]:
        """This process's part of the batch of a step."""
        epoch, place = divmod(step, self.batches_per_epoch)
        if self._orders[0] != epoch:
            orders = [
                torch.randperm(len(data), generator=seeded(self.seed, 2, lane, epoch)).to(data.networks.device)
                for lane, data in zip(self.own, self.data, strict=True)
            ]
            self._orders = epoch, orders
        taken = slice(place * self.per_lane, (place + 1) * self.per_lane)
        parts = [data.batch(order[taken]) for data, order in zip(self.data, self._orders[1], strict=True)]
        return WeightFeatures.cat(x for x, _ in parts), torch.cat([y for _, y in parts])


def dataset(networks: Networks, task: Task, generator: torch.Generator, device: torch.device) -> Dataset:
    """Networks of a split, augmented if the task says so, on the device."""
    if task.augment is not None:
        networks = task.augment(networks, generator)
    return Dataset(task.prepare(networks), task.targets(networks)).to(device)


def seeded(*numbers: int) -> torch.Generator:
    """A generator whose seed is made of several numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)


@dataclass
class State:
    """What a run has so far; all of it is in its checkpoint."""

    step: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    seconds: float = 0.0


class Run:
    """One model trained on one data set with one seed.

    Args:
        folder: for metrics.jsonl, metrics.csv, checkpoint.pt and result.json; None to write nothing. If it holds the
            checkpoint of a run with the same settings, that run goes on.
    """

    def __init__(
        self, task: Task, system: str, source: Source, settings: Settings, seed: int, world: World, folder: Path | None
    ):
        self.task, self.system, self.source, self.settings = task, system, source, settings
        self.seed, self.world, self.folder = seed, world, folder
        if system not in task.systems:
            raise ValueError(f"{task.name} has no model {system!r}; choose one of {', '.join(task.systems)}")
        self.lanes = Lanes(source, task, settings, world, seed)
        torch.manual_seed(seed)
        self.model = task.systems[system](source.space, settings.model).to(world.device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in trained)
        self.optimiser = torch.optim.AdamW(
            trained, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "float16")
        self.shared: nn.Module = self.model
        if world.size > 1:
            self.shared = DistributedDataParallel(self.model, static_graph=True)
        self.state, self.best_weights = State(), self._weights()
        self._splits: dict[str, Dataset] = {}
        self._resume()

    @property
    def identity(self) -> dict[str, Any]:
        """What two runs must have in common for one to go on where the other stopped."""
        about = {"task": self.task.name, "model": self.system, "seed": self.seed, "data": self.source.folder.name}
        settings = (
            asdict(replace(self.settings, steps=0)) if self.settings.schedule == "constant" else asdict(self.settings)
        )
        return about | {"augmented": self.task.augment is not None} | settings

    def train(self, progress: Progress) -> dict[str, Any]:
        """Trains to the end, and evaluates the best model on the test split."""
        settings, state = self.settings, self.state
        task = progress.add_task(self.system, total=settings.steps, completed=state.step)
        losses: list[Tensor] = []
        start = time.perf_counter()
        while state.step < settings.steps and not self._out_of_patience():
            losses.append(self.step())
            progress.update(task, advance=1)
            if state.step % settings.evaluate_every == 0 or state.step == settings.steps:
                loss = float(self.world.mean(torch.stack(losses).mean()))
                if not math.isfinite(loss):
                    raise ArithmeticError(
                        f"{self.system}: the loss is {loss} at step {state.step}; lower the learning rate"
                    )
                state.seconds += time.perf_counter() - start
                self._note(loss)
                losses, start = [], time.perf_counter()
                shown = f"{self.system}  loss {loss:.4f}, {self.task.metric} {state.history[-1]['val']:.4g}"
                progress.update(task, description=shown)
        progress.remove_task(task)
        self.model.load_state_dict(self.best_weights)
        result = {
            "task": self.task.name,
            "data": self.source.folder.name,
            "model": self.system,
            "seed": self.seed,
            "metric": self.task.metric,
            "test": self.evaluate("test"),
            "val": state.best,
            "best_step": state.best_step,
            "steps": state.step,
            "batch_size": settings.batch_size,
            "parameters": self.parameters,
            "seconds": round(state.seconds, 1),
        }
        self._write("result.json", json.dumps(result | {"settings": asdict(settings)}, indent=2) + "\n")
        return result

    def step(self) -> Tensor:
        """One batch; this process's loss, left on the device."""
        state = self.state
        networks, targets = self.lanes.batch(state.step)
        torch.manual_seed(seeded(self.seed, 3, state.step, self.world.rank).initial_seed())  # of noise, dropout
        if noise := self.settings.weight_noise:
            networks = networks.map(lambda x: x * (1 + noise * torch.randn_like(x)))
        self.model.train()
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.rate(state.step)
        with self._autocast():
            output = self.shared(networks)
        loss = self.task.loss(_float(output), targets)
        self.optimiser.zero_grad()
        self.scaler.scale(loss).backward()
        if self.settings.clip is not None:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        state.step += 1
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, split: str) -> float:
        """The metric on a split, whose networks the processes share."""
        if split not in self._splits:
            self._splits[split] = self._own_part(split)
        data = self._splits[split]
        self.model.eval()
        predictions = []
        for index in torch.arange(len(data), device=data.networks.device).split(256):
            networks_of_batch, targets = data.batch(index)
            with self._autocast():
                output = self.model(networks_of_batch)
            predictions.append(self.task.predictions(_float(output), targets))
        return self.task.score(self.world.gather(torch.cat(predictions)).cpu(), self.world.gather(data.targets).cpu())

    def _own_part(self, split: str) -> Dataset:
        """What this process evaluates: some of the blocks that augmentation goes by."""
        count, own = self.source.count(split), LANES // self.world.size
        parts = []
        for block in range(self.world.rank * own, (self.world.rank + 1) * own):
            start, stop = block * count // LANES, (block + 1) * count // LANES
            if start < stop:
                networks = self.source.read(split, start, stop)
                parts.append(dataset(networks, self.task, seeded(self.seed, 4, block), self.world.device))
        if not parts:
            raise DataError(f"{self.source.folder} has {count} networks in its {split} split, too few to share")
        return Dataset(WeightFeatures.cat(part.networks for part in parts), torch.cat([part.targets for part in parts]))

    def _autocast(self) -> Any:
        if self.settings.precision == "float32":
            return nullcontext()
        return torch.autocast(self.world.device.type, getattr(torch, self.settings.precision))

    def _out_of_patience(self) -> bool:
        return self.settings.patience is not None and self.state.since_best >= self.settings.patience

    def _note(self, loss: float) -> None:
        """Evaluates, keeps the best model, writes metrics and checkpoint."""
        state, val = self.state, self.evaluate("val")
        state.history.append({"step": state.step, "loss": loss, "val": val, "seconds": round(state.seconds, 2)})
        if state.best is None or self.task.better(val, state.best):
            state.best, state.best_step, state.since_best = val, state.step, 0
            self.best_weights = self._weights()
        else:
            state.since_best += 1
        self._write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in state.history))
        table = io.StringIO()
        writer = csv.DictWriter(table, state.history[0])
        writer.writeheader()
        writer.writerows(state.history)
        self._write("metrics.csv", table.getvalue())
        content = io.BytesIO()
        torch.save(
            {
                "identity": self.identity,
                "state": asdict(state),
                "model": self.model.state_dict(),
                "best_weights": self.best_weights,
                "optimiser": self.optimiser.state_dict(),
                "scaler": self.scaler.state_dict(),
            },
            content,
        )
        self._write("checkpoint.pt", content.getvalue())

    def _resume(self) -> None:
        if self.folder is None or not (self.folder / "checkpoint.pt").exists():
            return
        path = self.folder / "checkpoint.pt"
        saved = torch.load(path, map_location=self.world.device, weights_only=True)
        if saved["identity"] != self.identity:
            differing = [k for k, v in self.identity.items() if saved["identity"].get(k) != v]
            raise ValueError(
                f"{path} is of another run (other {', '.join(differing)}); give another folder or delete it"
            )
        self.state = State(**saved["state"])
        self.model.load_state_dict(saved["model"])
        self.best_weights = saved["best_weights"]
        self.optimiser.load_state_dict(saved["optimiser"])
        self.scaler.load_state_dict(saved["scaler"])

    def _weights(self) -> dict[str, Tensor]:
        return {name: x.detach().clone() for name, x in self.model.state_dict().items()}

    def _write(self, name: str, content: str | bytes) -> None:
        if self.folder is not None and self.world.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / name, content if isinstance(content, bytes) else content.encode())


def _float(output: Any) -> Any:
    return output.to(torch.float32) if isinstance(output, WeightFeatures) else output.float()
