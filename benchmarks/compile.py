"""Every Triton kernel compiled ahead of time, for machines that need not be here: registers, spills, shared memory."""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks.layers import SHAPES, Shape
from magep_fast import WeightSpace
from magep_fast.terms import GROUPS, equivariant_table, invariant_table

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Backend, architecture and warp size, as Triton names them."""

SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10}
"""Bytes that one block may have."""

RESOURCES = Path(__file__).resolve().parent / "triton_resources.csv"
REPORT = Path(__file__).resolve().parent.parent / "docs" / "triton_compile.md"

_TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


@dataclass(frozen=True)
class Compiled:
    """What one kernel of one layer takes on one machine."""

    target: str
    shape: str
    dtype: str
    layer: str
    kernel: str
    warps: int
    registers: int
    spills: int
    scalar_spills: int
    shared: int


def layer_launches(
    kind: str, shape: Shape, dtype: torch.dtype, activation: str | None = None, training: bool = True
) -> dict[str, list[Any]]:
    """The launches of a layer's forward and backward pass at their default configuration, described and not run."""
    from magep_fast.triton_kernels import equivariant, invariant
    from magep_fast.triton_kernels.launch import Problem, default_config, recorded

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    B, d, n = shape.batch_size, shape.channels, shape.widths
    space = WeightSpace(n)
    weights = [empty(B, d, n[i], n[i - 1]) for i in range(1, len(n))]
    biases = [empty(B, d, width) for width in n[1:]]
    problem = Problem(B, d, d, n, dtype, activation if kind == "equivariant" else None)
    config = default_config(problem)
    if kind == "equivariant":
        table = equivariant_table(space, space.taps, d, d, GROUPS["all"])
    else:
        table = invariant_table(space, d, d, GROUPS["all"])
    matrices, psi = [empty(*output.shape) for output in table.outputs], empty(*table.psi_shape)
    with recorded() as forward:
        if kind == "equivariant":
            keep = training and activation == "sin"
            outputs, arguments, saved = equivariant.forward(problem, config, weights, biases, matrices, psi, keep)
        else:
            out, *saved = invariant.forward(problem, config, weights, biases, matrices[0], psi)
    with recorded() as backward:
        if kind == "equivariant":
            kept = arguments or outputs
            equivariant.backward(problem, config, outputs, kept, weights, biases, matrices, psi, saved)
        else:
            invariant.backward(problem, config, out, weights, biases, matrices[0], psi, saved)
    return {"forward": forward, "backward": backward}


def _type(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, tuple):
        return tuple(map(_type, value))
    return "i32" if abs(value) < 2**31 else "i64"


def compile_launch(launch: Any, target: str) -> Any:
    """Compiles a launch as Triton's own launcher would: numbers that are 1 as constants (but inside tuples), the same
    facts about divisibility by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    facts: dict[tuple[int, ...], Any] = {}
    for position, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        if name.isupper() or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _type(value)
        items = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for k, item in items:
            if isinstance(item, Tensor) or item % 16 == 0:
                facts[(position,) if k is None else (position, k)] = [["tt.divisibility", 16]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return triton.compile(
            ASTSource(launch.kernel, signature, constants, facts),
            target=GPUTarget(*TARGETS[target]),
            options=launch.options(TARGETS[target][0]),
        )


def resources(kernel: Any, target: str) -> tuple[int, int, int]:
    """Registers a thread, and 32-bit words spilled to memory and, of scalars on AMD, to vector registers."""
    if TARGETS[target][0] == "hip":
        found = {
            name: int(re.search(rf"\.{name}:\s+(\d+)", kernel.asm["amdgcn"])[1])  # type: ignore[index]
            for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        }
        return found["vgpr_count"], found["vgpr_spill_count"], found["sgpr_spill_count"]
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        run = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout + run.stderr).groups()  # type: ignore[union-attr]
    return int(registers), int(stack) // 4, 0


def compile_shape(key: str, dtype: torch.dtype, target: str) -> list[Compiled]:
    """Every kernel of both layers at one of the benchmarks' shapes."""
    found = {}
    for kind in ("equivariant", "invariant"):
        passes = layer_launches(kind, SHAPES[key], dtype)
        for launch in (*passes["forward"], *passes["backward"]):
            kernel = compile_launch(launch, target)
            registers, spills, scalar_spills = resources(kernel, target)
            name = launch.kernel.__name__
            found[kind, name] = Compiled(
                target, key, str(dtype).removeprefix("torch."), kind, name, launch.warps,
                registers, spills, scalar_spills, kernel.metadata.shared,
            )  # fmt: skip
    return list(found.values())


def compile_all(
    shapes: list[str], targets: list[str], dtypes: list[torch.dtype], workers: int
) -> Iterator[list[Compiled]]:
    """One list per shape, dtype and target, in parallel processes; Triton keeps what it compiled in its cache."""
    jobs = [(key, dtype, target) for key in shapes for dtype in dtypes for target in targets]
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(partial(_call, compile_shape), jobs)


def _call(function: Any, arguments: tuple) -> Any:
    return function(*arguments)


def markdown(rows: list[Compiled]) -> str:
    """A table with one line per kernel, shape and dtype and, per machine, registers / shared memory in KiB."""
    import triton

    targets = [target for target in TARGETS if any(row.target == target for row in rows)]
    lines = [
        "# Triton kernels, compiled",
        "",
        f"The output of `python -m benchmarks compile --write`, Triton {triton.__version__}, without a GPU: default "
        "configurations at the",
        "shapes of the benchmarks, no activation. Each cell: registers a thread / KiB of shared memory. Words spilled "
        "to memory",
        "follow in brackets where there are any, without the scalars that AMD's compiler parks in vector registers.",
        "`benchmarks/triton_resources.csv` has the same numbers.",
        "",
        "| shape | dtype | layer | kernel | warps | " + " | ".join(targets) + " |",
        "|---|---|---|---|---|" + "---|" * len(targets),
    ]
    cells: dict[tuple, dict[str, str]] = {}
    for row in rows:
        spilled = f" ({row.spills})" if row.spills else ""
        line = cells.setdefault((row.shape, row.dtype, row.layer, row.kernel, row.warps), {})
        line[row.target] = f"{row.registers} / {row.shared / 1024:.0f}{spilled}"
    lines += [
        f"| {key} | {dtype} | {layer} | `{kernel}` | {warps} | {' | '.join(found[target] for target in targets)} |"
        for (key, dtype, layer, kernel, warps), found in cells.items()
    ]
    return "\n".join(lines) + "\n"


def write_resources(rows: list[Compiled]) -> None:
    with RESOURCES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Compiled))
        writer.writerows(astuple(row) for row in rows)


def read_resources() -> list[Compiled]:
    """The committed table."""
    with RESOURCES.open(newline="") as file:
        return [_parse(row) for row in csv.DictReader(file)]


def _parse(row: dict[str, str]) -> Compiled:
    values: list[Any] = [int(row[f.name]) if f.type == "int" else row[f.name] for f in fields(Compiled)]
    return Compiled(*values)


def run(arguments: argparse.Namespace) -> None:
    if arguments.write and not (arguments.shapes, arguments.targets, arguments.dtypes) == _everything():
        raise SystemExit("--write makes the whole table: give it without --shapes, --targets and --dtypes")
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    rows: list[Compiled] = []
    with Progress(console=Console(stderr=True)) as progress:
        jobs = len(arguments.shapes) * len(dtypes) * len(arguments.targets)
        task = progress.add_task("compiling", total=jobs)
        for some in compile_all(arguments.shapes, arguments.targets, dtypes, arguments.workers):
            rows += some
            progress.update(task, advance=1, description=f"{some[0].shape} {some[0].dtype} {some[0].target}")
    text = markdown(rows)
    if arguments.write:
        REPORT.write_text(text)
        write_resources(rows)
    else:
        print(text)


def _everything() -> tuple[list[str], list[str], list[str]]:
    return list(SHAPES), list(TARGETS), ["float32", "bfloat16"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes, targets, dtypes = _everything()
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes, help="which shapes")
    parser.add_argument("--targets", nargs="+", choices=targets, default=targets, help="which machines")
    parser.add_argument("--dtypes", nargs="+", default=dtypes, help="which dtypes")
    parser.add_argument("--workers", type=int, default=2, help="processes that compile")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write {REPORT.name} and {RESOURCES.name} instead of printing the table; stopped and started again it "
        "goes on where it was, as Triton keeps what it compiled",
    )
    parser.set_defaults(run=run)
