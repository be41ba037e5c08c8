"""From a layer's shape to launches: sizes of buffers, tile sizes, and the launch itself.

A `Launch` is everything that a kernel is started with, so that the same description is run, compiled ahead of time for
machines that are not here, and counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf, prod
from typing import Any

import torch
import triton
import triton.language as tl

AUTOTUNE_VARIABLE = "MAGEP_FAST_TRITON_AUTOTUNE"


@dataclass(frozen=True)
class Config:
    """Tile sizes, powers of two, and warps.

    A tile of a middle layer has j × k positions, or short × long where one side is summed over, and d channels; it
    makes e channels, or sums over them by steps of e_step. A tile of an edge has r rows of coefficients and y
    positions, or r_step and y_step where they are summed over, and z of the columns that Φ' sums over. Chains multiply
    c × n by steps of inner. Steps are short because float32 products without tf32 hold whole operands in registers.
    """

    d: int = 16
    e: int = 32
    e_step: int = 16
    j: int = 4
    k: int = 32
    short: int = 4
    long: int = 32
    r: int = 32
    y: int = 32
    r_step: int = 16
    y_step: int = 16
    z: int = 4
    c: int = 16
    n: int = 32
    inner: int = 16
    chain_warps: int = 2
    mix_warps: int = 8
    back_warps: int = 4


@dataclass(frozen=True)
class Problem:
    """The shape of a call: networks, channels in, channels or features out, n_0 … n_L, and how to compute."""

    batch: int
    d: int
    e: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    activation: str | None = None
    allow_tf32: bool = False

    @property
    def L(self) -> int:
        return len(self.widths) - 1

    @property
    def n_0(self) -> int:
        return self.widths[0]

    @property
    def n_L(self) -> int:
        return self.widths[-1]

    @property
    def items(self) -> int:
        return self.batch * self.d

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of sums and of all that is kept between kernels."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @cached_property
    def arithmetic(self) -> dict[str, Any]:
        """OPERAND, COMPUTE and PRECISION. 16-bit operands go to tensor cores as they are; chains, kept in float32, are
        then multiplied in tf32, which is no coarser."""
        low = self.dtype.itemsize == 2
        names = {torch.float64: tl.float64, torch.float32: tl.float32, torch.float16: tl.float16}
        operand, compute = names.get(self.dtype, tl.bfloat16), names[self.compute_dtype]
        return {"OPERAND": operand, "COMPUTE": compute, "PRECISION": "tf32" if low or self.allow_tf32 else "ieee"}

    @property
    def ends(self) -> dict[str, int]:
        return {"N_0": self.n_0, "N_L": self.n_L}

    @property
    def prefix_size(self) -> int:
        return self.items * sum((self.n_0 + i) * self.widths[i] for i in range(1, self.L + 1))

    def section_size(self, rows: int) -> int:
        """Of [rows, n_i] for every item and hidden layer i."""
        return self.items * rows * sum(self.widths[1:-1])

    def connection_size(self, mix: bool) -> int:
        """G_L, or all G_i and H."""
        G = (self.n_0 + 1) * self.n_0
        return self.items * (self.L * G + 2 * self.n_L**2 if mix else G)

    @property
    def readout_columns(self) -> int:
        return self.d * (3 * self.n_L * self.n_0 + self.L * self.n_L + 2 * (self.L - 1)) + 1

    def num_pairs(self, mix: bool) -> int:
        return 3 * self.L - 2 if mix else self.L

    def pairs(self, mix: bool) -> dict[str, int]:
        """Where (L, 0) and (1, 1) stand among the pairs of psi."""
        return {"FIRST_PAIR": self.L - 1 if mix else 0, "TRACE_PAIR": 2 * self.L - 1 if mix else 1}

    def edges(self) -> list[tuple[int, int, int]]:
        """Rows, positions and blocks of d columns of each edge: weight_1, the hidden biases, weight_L."""
        n = self.widths
        first = (self.e * self.n_0, n[1], 3 * self.n_0 + 1)
        biases = [(self.e, n[i], 3 * self.n_0 + i) for i in range(1, self.L)]
        return [first, *biases, (self.e * self.n_L, n[self.L - 1], 3 * self.n_L)]

    def middle(self) -> list[tuple[int, int]]:
        """n_i and n_(i-1) of the middle layers."""
        return [(self.widths[i], self.widths[i - 1]) for i in range(2, self.L)]


@dataclass(frozen=True)
class Chunk:
    """Networks first … first + count − 1, the index-th of so many chunks."""

    index: int
    chunks: int
    first: int
    count: int


CACHE = 32 << 20
"""Bytes that the last-level cache of any GPU meant here holds for sure."""


def chunks_of(problem: Problem) -> list[Chunk]:
    """The networks that a backward pass takes together: all, or one half after the other if weights, output gradients,
    factors and their gradients, each read by several launches, are more than a cache holds."""
    n = problem.widths
    features = sum((problem.d + problem.e) * n[i] * (n[i - 1] + 1) for i in range(1, problem.L + 1))
    factors = problem.prefix_size + problem.section_size(2 * problem.n_L)
    size = problem.batch * features * problem.dtype.itemsize + 2 * factors * problem.compute_dtype.itemsize
    if size <= CACHE or problem.batch < 2:
        return [Chunk(0, 1, 0, problem.batch)]
    half = cdiv(problem.batch, 2)
    return [Chunk(0, 2, 0, half), Chunk(1, 2, half, problem.batch - half)]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def block(size: int, most: int, least: int = 1) -> int:
    """The power of two that covers a size, within bounds that are powers of two."""
    return max(least, min(most, triton.next_power_of_2(max(size, 1))))


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and all arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int = 1  # several programs per multiprocessor hide latency; pipelined loops would spill registers

    def options(self, backend: str) -> dict[str, int]:
        """For Triton's "cuda" or "hip" compiler. Left alone, ptxas spills a few registers for the sake of occupancy."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"maxnreg": 255} if backend == "cuda" else options

    def run(self) -> None:
        if prod(self.grid) > 0:
            self.kernel[self.grid](**self.arguments, **self.options("cuda" if torch.version.hip is None else "hip"))


_recording: list[Launch] | None = None


def run(launches: Iterable[Launch]) -> None:
    """Runs launches in order, or inside `recorded` only notes them."""
    for launch in launches:
        if _recording is None:
            launch.run()
        else:
            _recording.append(launch)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What is launched inside, described and not run."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before


WIDTHS = (16, 32, 64, 128, 256)
"""Classes of hidden widths: a network is in the least that holds its widest hidden layer, or in the last."""


def width_class(problem: Problem) -> int:
    widest = max(problem.widths[1:-1])
    return next((width for width in WIDTHS if widest <= width), WIDTHS[-1])


def config_key(problem: Problem) -> tuple[int, int, int, str]:
    """What the choice of tile sizes depends on."""
    kind = "16-bit" if problem.dtype.itemsize == 2 else "float32"
    return problem.d, problem.e, width_class(problem), kind


_FIELDS = ("d", "e", "j", "k", "short", "long", "r", "y", "n", "chain_warps", "mix_warps", "back_warps")
DEFAULTS: dict[tuple[int, int, int, str], tuple[int, ...]] = {
    (20, 20, 16, "float32"): (16, 32, 4, 16, 8, 16, 32, 16, 16, 2, 8, 4),
    (128, 128, 32, "float32"): (16, 32, 2, 32, 4, 32, 32, 32, 32, 2, 8, 4),
    (64, 64, 32, "float32"): (16, 32, 2, 32, 4, 32, 32, 32, 32, 2, 8, 4),
    (16, 16, 256, "float32"): (16, 16, 1, 64, 4, 64, 16, 64, 64, 4, 8, 8),
    (32, 32, 64, "float32"): (16, 32, 1, 64, 2, 64, 32, 64, 64, 4, 8, 4),
    (20, 20, 16, "16-bit"): (16, 32, 4, 16, 8, 16, 32, 16, 16, 2, 8, 4),
    (128, 128, 32, "16-bit"): (16, 32, 2, 32, 4, 32, 32, 32, 32, 2, 8, 4),
    (64, 64, 32, "16-bit"): (16, 32, 2, 32, 4, 32, 32, 32, 32, 2, 8, 4),
    (16, 16, 256, "16-bit"): (16, 16, 1, 64, 4, 64, 16, 64, 64, 4, 8, 8),
    (32, 32, 64, "16-bit"): (16, 32, 1, 64, 2, 64, 32, 64, 64, 4, 8, 4),
}
"""The _FIELDS of Config by `config_key`, for the shapes of the paper: chosen so that no kernel spills registers, see
docs/triton_compile.md."""


def default_config(problem: Problem) -> Config:
    """The entry of DEFAULTS; for other shapes tiles as wide as the layers are, up to what registers hold."""
    wide = width_class(problem)
    k = block(wide, 64, 16)
    long = block(wide, 64, 16)
    rule = Config(
        d=block(problem.d, 16, 16),
        e=block(problem.e, 32, 16),
        j=64 // k,
        k=k,
        short=(256 if wide > 64 else 128) // long,
        long=long,
        r=block(problem.e, 32, 16),
        y=block(wide, 64, 16),
        z=block(max(problem.n_0, 2 * problem.n_L), 4),
        c=block(max(problem.n_0 + problem.L - 1, problem.n_L), 32, 16),
        n=block(wide, 64, 16),
        inner=16,
        chain_warps=4 if wide > 32 else 2,
        mix_warps=8,
        back_warps=8 if wide > 64 else 4,
    )
    known = DEFAULTS.get(config_key(problem))
    return rule if known is None else replace(rule, **dict(zip(_FIELDS, known, strict=True)))


def candidates(problem: Problem) -> list[Config]:
    """The default and its neighbours, for autotuning."""
    default = default_config(problem)
    found = [default]
    for change in (
        {"mix_warps": 4}, {"back_warps": 8}, {"chain_warps": 1}, {"chain_warps": 4}, {"chain_warps": 8},
        {"j": default.j * 2}, {"short": default.short * 2}, {"e": min(128, default.e * 2)}, {"d": 32},
        {"r": 64}, {"r": 16}, {"n": default.n * 2},
    ):  # fmt: skip
        config = replace(default, **change)
        if config not in found:
            found.append(config)
    return found


_tuned: dict[tuple[Hashable, ...], Config] = {}


def choose_config(name: str, problem: Problem, measure: Callable[[Config], object], device: torch.device) -> Config:
    """The default, at once; with MAGEP_FAST_TRITON_AUTOTUNE=1, on a GPU, the fastest candidate, found once for every
    pass, device, dtype and `config_key`. Measuring waits for the device: while a CUDA graph is captured, what was not
    measured before is taken at its default."""
    if os.environ.get(AUTOTUNE_VARIABLE, "0") in ("", "0") or device.type == "cpu":
        return default_config(problem)
    key = name, device, problem.dtype, problem.allow_tf32, config_key(problem)
    if key not in _tuned:
        if torch.cuda.is_current_stream_capturing():
            return default_config(problem)
        _tuned[key] = min(candidates(problem), key=partial(_milliseconds, measure))
    return _tuned[key]


def _milliseconds(measure: Callable[[Config], object], config: Config) -> float:
    try:
        return triton.testing.do_bench(lambda: measure(config), return_mode="median")
    except triton.runtime.errors.OutOfResources:
        return inf
