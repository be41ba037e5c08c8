"""A model, not a measurement: bytes moved, flops and launches of the literal reference and of the GPU kernels, and the
time that published rates of some GPUs would give them.

The reference is counted from a trace of its torch ops; kernels from what their programs read and write, in the order in
which they are numbered. Both pass through the same model of a cache, so that a second read may be free.
"""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks import cuda_model
from benchmarks.layers import LAYERS, SHAPES, Shape, Subject
from benchmarks.report import append_rows, wide_console
from magep_fast import WeightSpace


@dataclass(frozen=True)
class Gpu:
    """Published peak rates: bytes and float32 flops (without tf32) a second; bytes of last-level cache."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    cache: int


GPUS = (
    Gpu("A100", 2.039e12, 19.5e12, 40 << 20),
    Gpu("H100", 3.35e12, 67e12, 50 << 20),
    Gpu("MI300X", 5.3e12, 163.4e12, 256 << 20),
)
LAUNCH_SECONDS = 5e-6

ASSUMPTIONS = (
    "Modelled, never measured: no GPU was at hand. float32 without tf32, peak rates of the vendors' data sheets (A100 "
    "80 GB SXM, H100 SXM, MI300X).",
    f"Every launch, and every torch op that is not a view, costs {LAUNCH_SECONDS * 1e6:.0f} µs and then the longer of "
    "its arithmetic and its memory traffic.",
    "Memory traffic is what misses one least-recently-used cache as large as the GPU's last level (A100 and H100 L2, "
    "MI300X Infinity Cache), empty at first; what was written is written back when it leaves, and all of it in the "
    "end. Streams (.cs) leave at once.",
    "Programs run in the order of their numbers, and those that share data at about the same time; all programs of the "
    "chains advance in step.",
    "A whole last-level cache for one layer is the favourable case, of which the times are. Beside it: the same with "
    "half the cache; and cold, where nothing survives from one launch to the next and each moves what it touches once.",
    "Launches of the GPU kernels: bytes are those that a launch touches at least once (the cold case); occupancy is "
    "resident threads over the most a multiprocessor can have, by registers and shared memory of "
    "benchmarks/triton_resources.csv and csrc/cuda/resources.csv.",
)


Part = tuple[Hashable, int]
"""Something in memory and its size in bytes."""

Access = tuple[Hashable, int, bool, bool]
"""A part, whether it is written, and whether as a stream, which does not stay in the cache."""


@dataclass
class Launch:
    """One kernel: its flops and, in order, what it reads and writes, how much, and whether as a stream."""

    name: str
    flops: float
    accesses: list[Access] = field(default_factory=list)

    def read(self, *parts: Part, stream: bool = False) -> None:
        self.accesses += [(*part, False, stream) for part in parts]

    def write(self, *parts: Part, stream: bool = False) -> None:
        self.accesses += [(*part, True, stream) for part in parts]


class Cache:
    """Least recently used, with write-back. Counts bytes that cross to memory."""

    def __init__(self, capacity: int):
        self.capacity, self.used, self.traffic = capacity, 0, 0
        self.lines: OrderedDict[Hashable, tuple[int, bool]] = OrderedDict()

    def access(self, what: Hashable, size: int, written: bool, stream: bool) -> None:
        before, dirty = self.lines.pop(what, (0, False))
        self.used -= before
        if not written:
            self.traffic += max(0, size - before)
        if stream:
            self.traffic += max(size * written, before * dirty)
            return
        self.lines[what] = max(size, before), dirty or written
        self.used += max(size, before)
        while self.used > self.capacity:
            _, (evicted, was_dirty) = self.lines.popitem(last=False)
            self.used -= evicted
            self.traffic += evicted * was_dirty

    def flush(self) -> None:
        self.traffic += sum(size for size, dirty in self.lines.values() if dirty)
        self.lines.clear()
        self.used = 0


@dataclass(frozen=True)
class Prediction:
    traffic: float
    flops: float
    launches: int
    seconds: float


def predict(launches: Iterable[Launch], gpu: Gpu) -> Prediction:
    """Launches one after the other on a GPU; what is left in its cache at the end is written back with the last one."""
    cache, seconds, flops, count = Cache(gpu.cache), 0.0, 0.0, 0
    for launch in launches:
        before = cache.traffic
        for access in launch.accesses:
            cache.access(*access)
        moved = cache.traffic - before
        seconds += LAUNCH_SECONDS + max(launch.flops / gpu.flops_per_second, moved / gpu.bytes_per_second)
        flops += launch.flops
        count += 1
    before = cache.traffic
    cache.flush()
    return Prediction(cache.traffic, flops, count, seconds + (cache.traffic - before) / gpu.bytes_per_second)


class _Trace(TorchDispatchMode):
    """Every op that is not a view, with its flops and the storages it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            return result
        counter = flop_registry.get(func._overloadpacket)
        launch = Launch(str(func), counter(*args, **(kwargs or {}), out_val=result) if counter else 0)
        for tensors, written in ((args, False), (result, True)):
            for x in torch.utils._pytree.tree_leaves(tensors):
                if isinstance(x, Tensor) and x.numel():
                    # An expanded tensor has few numbers in memory.
                    size = min(x.numel() * x.itemsize, x.untyped_storage().nbytes())
                    launch.accesses.append((x.untyped_storage().data_ptr(), size, written, False))
        self.launches.append(launch)
        return result


def trace_reference(kind: str, shape: Shape) -> dict[str, list[Launch]]:
    """Forward alone, and forward with backward."""
    torch.manual_seed(0)
    layer = LAYERS[kind](WeightSpace(shape.widths), shape.channels, shape.channels)
    subject = Subject(layer, shape.features(), "reference")
    found = {}
    for name, function in (("forward", subject.inference), ("both", subject.training)):
        with _Trace() as trace:
            function()
        found[name] = trace.launches
    return found


@dataclass(frozen=True)
class Sizes:
    """Numbers of everything that kernels move, by layer (1 … L) and for one network where a batch has one each."""

    shape: Shape
    itemsize: int = 4

    @property
    def d(self) -> int:
        return self.shape.channels

    e = d

    @property
    def n(self) -> tuple[int, ...]:
        return self.shape.widths

    @property
    def L(self) -> int:
        return len(self.n) - 1

    def weight(self, i: int) -> int:
        return self.d * self.n[i] * self.n[i - 1]

    def bias(self, i: int) -> int:
        return self.d * self.n[i]

    def matrix(self, name: str, i: int) -> int:
        d, e, n_0, n_L, L = self.d, self.e, self.n[0], self.n[-1], self.L
        if name == "weight":
            rows, slots = (e * n_0, 3 * n_0 + 1) if i == 1 else (e * n_L, 3 * n_L) if i == L else (e, 3)
            return rows * slots * d
        return e * n_L * self.readout if i == L else e * (3 * n_0 + i) * d

    @property
    def readout(self) -> int:
        n_0, n_L, L = self.n[0], self.n[-1], self.L
        return self.d * (3 * n_L * n_0 + L * n_L + 2 * (L - 1)) + 1

    def psi(self, mix: bool) -> int:
        return (3 * self.L - 2 if mix else self.L) * (self.n[0] + 1) * self.n[-1] * self.d

    def parameters(self, kind: str) -> int:
        if kind == "invariant":
            return self.e * self.readout + self.psi(False)
        return self.psi(True) + sum(self.matrix(x, i) for i in range(1, self.L + 1) for x in ("weight", "bias"))

    def features(self) -> int:
        return self.shape.batch_size * sum(self.weight(i) + self.bias(i) for i in range(1, self.L + 1))


def minimum_traffic(kind: str, shape: Shape) -> dict[str, int]:
    """Bytes of everything once: inputs and parameters read, outputs written; backward, inputs, parameters and output
    gradients read, gradients of inputs and parameters written."""
    sizes = Sizes(shape)
    inputs, parameters = sizes.features(), sizes.parameters(kind)
    outputs = inputs if kind == "equivariant" else shape.batch_size * shape.channels
    forward = inputs + parameters + outputs
    return {"forward": 4 * forward, "both": 4 * (2 * forward + inputs + parameters)}


class TritonCount:
    """What the kernels of `triton_kernels/` read, write and compute, launch by launch."""

    def __init__(self, shape: Shape):
        from magep_fast.triton_kernels.equivariant import num_splits
        from magep_fast.triton_kernels.launch import Problem, chunks_of, default_config

        self.sizes = s = Sizes(shape)
        self.B, self.L, self.d, self.e, self.n = shape.batch_size, s.L, s.d, s.e, s.n
        self.n_0, self.n_L = s.n[0], s.n[-1]
        self.problem = Problem(self.B, self.d, self.e, self.n, torch.float32)
        self.config = default_config(self.problem)
        self.splits = num_splits(self.problem, self.config)
        self.chunks = [range(chunk.first, chunk.first + chunk.count) for chunk in chunks_of(self.problem)]
        self.layers, self.hidden, self.middle = range(1, self.L + 1), range(1, self.L), range(2, self.L)

    # One network's part of a factor, or of a gradient of it: `bar` is "" or "_bar".
    def A(self, i: int, b: int, bar: str = "") -> Part:
        return ("A" + bar, i, b), 4 * self.d * (self.n_0 + i) * self.n[i]

    def S(self, t: int, b: int, bar: str = "") -> Part:
        return ("S" + bar, t, b), 4 * self.d * self.n_L * self.n[t]

    def U_bar(self, i: int, b: int) -> Part:
        return ("U_bar", i, b), 4 * self.d * (self.n_L + 1) * self.n[i]

    def g_bar(self, t: int, b: int) -> Part:
        return ("g_bar", t, b), 4 * self.d * self.n[t]

    def G(self, i: int, b: int, bar: str = "") -> Part:
        return ("G" + bar, i, b), 4 * self.d * (self.n_0 + 1) * self.n_0

    def H(self, b: int, bar: str = "") -> Part:
        return ("H" + bar, b), 4 * self.d * 2 * self.n_L**2

    def F(self, b: int, bar: str = "") -> Part:
        return ("F" + bar, b), 4 * self.sizes.readout

    def feature(self, what: str, i: int, b: int) -> Part:
        """Weights and biases that come in or go out, and their gradients; there are as many channels out as in."""
        return (what, i, b), 4 * (self.sizes.bias(i) if "bias" in what else self.sizes.weight(i))

    def matrix(self, what: str, i: int, bar: str = "") -> Part:
        return ("matrix_" + what + bar, i), 4 * self.sizes.matrix(what, i)

    def share(self, what: str, i: int, chunk: int = 0) -> Part:
        splits = self.splits[2 * i - (2 if what == "weight" else 1)]
        return ("share_" + what, i, chunk), 4 * splits * self.sizes.matrix(what, i)

    def psi(self, mix: bool) -> Part:
        return "psi", 4 * self.sizes.psi(mix)

    def launches(self, kind: str) -> dict[str, list[Launch]]:
        mix = kind == "equivariant"
        forward = [self.chain(mix), *([self.mix()] if mix else []), self.readout(mix)]
        backward = [self.readout_backward(mix)]
        for k, networks in enumerate(self.chunks if mix else [range(self.B)]):
            backward += [self.mix_backward(k, networks)] if mix else []
            backward += [self.chain_backward(mix, networks), self.weight_gradient(mix, networks)]
        return {"forward": forward, "both": [*forward, *backward, self.sum(mix)]}

    def chain_flops(self, suffix: bool) -> float:
        """Of one network."""
        columns = sum(
            self.n[i] * self.n[i - 1] * (self.n_0 + i - 1 + (self.n_L if suffix and i < self.L else 0))
            for i in range(2, self.L + 1)
        )
        small = self.n_0 * self.n_L * (self.n_0 + 1) * (self.L if suffix else 1) + self.n_L * self.n_0**2
        return 2.0 * self.d * (columns + small)

    def chain(self, mix: bool) -> Launch:
        """All programs advance in step, the two chains of a network at the same time: the worst order for a cache."""
        launch = Launch("chain", self.B * self.chain_flops(mix))
        launch.read(self.psi(mix))
        for i in self.layers:
            t = self.L - i
            for b in range(self.B):
                launch.read(self.feature("weight", i, b), self.feature("bias", i, b))
                if i > 1:
                    launch.read(self.A(i - 1, b))
                launch.write(self.A(i, b))
                if mix and t > 0:
                    launch.read(self.feature("weight", t + 1, b), *([self.S(t + 1, b)] if i > 1 else []))
                    launch.write(self.S(t, b))
        for b in range(self.B):
            launch.write(self.F(b), *(self.G(i, b) for i in (self.layers if mix else [self.L])))
            if mix:
                launch.write(self.H(b))
        return launch

    def middle_flops(self, i: int, products: float) -> float:
        """Products of channels at every position, and making the tiles of [WW] and [bW], once a block of e."""
        make = self.n_L + self.n_0 * self.n_L / self.config.k + 2
        return 2.0 * self.d * self.n[i] * self.n[i - 1] * (products * self.e + make * -(-self.e // self.config.e))

    def edges(self) -> list[tuple[int, int, int, int]]:
        """Rows, inner size, positions and products Φ' T of each edge."""
        e, n_0, n_L, n = self.e, self.n_0, self.n_L, self.n
        found = [(e * n_0, n_0 + 1, n[1], n_0 * (n_0 + 1))]
        found += [(e, n_0 + i, n[i], n_0 * (n_0 + 1)) for i in self.hidden]
        return [*found, (e * n_L, n_L, n[self.L - 1], 2 * n_L**2)]

    def edge_flops(self, tile: int) -> float:
        """Σ_x C Y and making C, once a tile of positions."""
        return sum(2.0 * self.d * r * (x * y + products * -(-y // tile)) for r, x, y, products in self.edges())

    def mix(self) -> Launch:
        flops = sum(self.middle_flops(i, 3) for i in self.middle) + self.edge_flops(self.config.y)
        launch = Launch("mix", self.B * flops)
        for b in reversed(range(self.B)):
            launch.read(self.psi(True))
            for i in self.middle:
                launch.read(self.matrix("weight", i), self.A(i, b), self.S(i - 1, b))
                launch.read(self.feature("weight", i, b), stream=True)
                launch.write(self.feature("out_weight", i, b), stream=True)
        for b in reversed(range(self.B)):
            self.read_edges(launch, b)
            launch.write(*(self.feature("out_weight", i, b) for i in (1, self.L)), stream=True)
            launch.write(*(self.feature("out_bias", i, b) for i in self.hidden), stream=True)
        return launch

    def read_edges(self, launch: Launch, b: int) -> None:
        for i in self.hidden:
            launch.read(self.matrix("bias", i), self.A(i, b), self.G(i, b))
        launch.read(self.matrix("weight", 1), self.matrix("weight", self.L), self.S(self.L - 1, b), self.H(b))

    def readout_rows(self, mix: bool) -> int:
        return self.e * self.n_L if mix else self.e

    def readout(self, mix: bool) -> Launch:
        rows, columns = self.readout_rows(mix), self.sizes.readout
        launch = Launch("readout", 2.0 * self.B * rows * columns)
        for _ in range(-(-self.B // 64)):
            launch.read((("matrix_bias", self.L), 4 * rows * columns))
        launch.read(*(self.F(b) for b in range(self.B)))
        launch.write((("out_bias", self.L), 4 * self.B * rows))
        return launch

    def readout_backward(self, mix: bool) -> Launch:
        rows, columns = self.readout_rows(mix), self.sizes.readout
        launch = Launch("readout_backward", 4.0 * self.B * rows * columns)
        launch.read((("grad_bias", self.L), 4 * self.B * rows), *(self.F(b) for b in range(self.B)))
        for _ in range(-(-self.B // 64)):
            launch.read((("matrix_bias", self.L), 4 * rows * columns), stream=True)
        launch.write(*(self.F(b, "_bar") for b in range(self.B)))
        launch.write((("matrix_bias_bar", self.L), 4 * rows * columns), stream=True)
        return launch

    def mix_backward(self, chunk: int, networks: range) -> Launch:
        d, e, n = self.d, self.e, self.n
        flops = 2 * self.edge_flops(self.config.y_step)
        for i in self.middle:
            make = 2 * (self.n_L + 1) + self.n_0 * self.n_L / self.config.short
            flops += self.middle_flops(i, 3) + 2 * d * n[i] * n[i - 1] * (4 * e + make)
        for (rows, positions, slots), (_, _, _, products) in zip(self.problem.edges(), self.edges(), strict=True):
            flops += 2 * d * positions * (rows * slots + products * -(-rows // self.config.r))
        launch = Launch("mix_backward", len(networks) * flops)
        launch.read(self.psi(True))
        if chunk == len(self.chunks) - 1:  # of all networks at once: the matrices of the edges are larger than the data
            for i in self.hidden:
                for b in range(self.B):
                    launch.read(self.feature("grad_bias", i, b), self.A(i, b), self.G(i, b))
                launch.write(self.share("bias", i), stream=True)
            for i in (1, self.L):
                for b in range(self.B):
                    launch.read(self.feature("grad_weight", i, b))
                    launch.read(*((self.A(1, b), self.G(1, b)) if i == 1 else (self.S(i - 1, b), self.H(b))))
                launch.write(self.share("weight", i), stream=True)
        for b in networks:
            self.read_edges(launch, b)
            launch.read(*(self.feature("grad_weight", i, b) for i in (1, self.L)))
            for i in self.hidden:
                launch.read(self.feature("grad_bias", i, b))
                launch.write(self.A(i, b, "_bar"), self.G(i, b, "_bar"))
            launch.write(self.S(self.L - 1, b, "_bar"), self.H(b, "_bar"))
        for b in networks:
            for i in self.middle:
                launch.read(self.matrix("weight", i), self.feature("grad_weight", i, b), self.A(i, b), self.S(i - 1, b))
                launch.write(self.U_bar(i, b), self.S(i - 1, b, "_bar"), self.g_bar(i - 1, b))
        for b in reversed(networks):
            for i in self.middle:
                launch.read(self.feature("grad_weight", i, b), self.feature("weight", i, b))
                launch.read(self.A(i, b), self.S(i - 1, b))
        launch.write(*(self.share("weight", i, chunk) for i in self.middle), stream=True)
        return launch

    def chain_backward(self, mix: bool, networks: range) -> Launch:
        """In step, as the chains."""
        launch = Launch("chain_backward", 2 * len(networks) * self.chain_flops(mix))
        launch.read(self.psi(mix))
        for b in networks:
            launch.read(self.F(b, "_bar"), self.A(self.L, b), self.G(self.L, b))
            launch.write(self.G(self.L, b, "_bar"), self.A(self.L, b, "_bar"))
            if mix:
                launch.read(self.H(b, "_bar"), *(self.G(i, b, "_bar") for i in self.hidden))
                for i in self.middle:
                    launch.read(self.A(i, b), self.U_bar(i, b))
        for i in range(self.L, 1, -1):
            t = self.L - i + 1
            for b in networks:
                launch.read(self.A(i, b, "_bar"), self.feature("weight", i, b))
                if mix:
                    launch.read(self.A(i - 1, b, "_bar"))
                launch.write(self.A(i - 1, b, "_bar"))
                if mix and t < self.L - 1:
                    launch.read(self.S(t, b), self.g_bar(t, b), self.S(t, b, "_bar"), self.S(t + 1, b, "_bar"))
                    launch.read(self.feature("weight", t + 1, b))
                    launch.write(self.S(t, b, "_bar"), self.S(t + 1, b, "_bar"))
        for b in networks:
            launch.write(*(self.feature("bias_bar", i, b) for i in self.layers), self.feature("weight_bar", 1, b))
            launch.write((("share_psi", b), 4 * self.sizes.psi(mix)))
        return launch

    def weight_gradient(self, mix: bool, networks: range) -> Launch:
        flops = sum(
            2.0
            * self.d
            * self.n[i]
            * self.n[i - 1]
            * (self.n_0 + i - 1 + (self.n_L + self.e * (i < self.L) if mix else 0))
            for i in range(2, self.L + 1)
        )
        launch = Launch("weight_gradient", len(networks) * flops)
        for b in reversed(networks):
            for i in range(2, self.L + 1):
                if mix and i < self.L:
                    launch.read(self.matrix("weight", i), self.feature("grad_weight", i, b), self.S(i, b))
                launch.read(self.A(i, b, "_bar"), self.A(i - 1, b))
                if mix:
                    launch.read(self.S(i - 1, b, "_bar"))
                launch.write(self.feature("weight_bar", i, b), stream=True)
        return launch

    def sum(self, mix: bool) -> Launch:
        launch = Launch("sum", float(self.B * self.sizes.psi(mix)))
        names = [(name, i) for i in self.layers for name in ("weight", "bias")][:-1] if mix else []
        for name, i in names:
            for chunk in range(len(self.chunks) if name == "weight" and i in self.middle else 1):
                launch.read(self.share(name, i, chunk))
                launch.flops += self.share(name, i, chunk)[1] / 4
            launch.write(self.matrix(name, i, "_bar"))
        launch.read(*((("share_psi", b), 4 * self.sizes.psi(mix)) for b in range(self.B)))
        launch.write(("psi_bar", 4 * self.sizes.psi(mix)))
        return launch


COUNTS: dict[str, Callable[[str, Shape], dict[str, list[Launch]]]] = {
    "triton": lambda kind, shape: TritonCount(shape).launches(kind),
}
"""Backends by name: (kind of layer, shape) to the launches of "forward" and of "both" passes. A backend joins here."""


def triton_counts(kind: str, key: str, gpu: cuda_model.Gpu) -> dict[str, list[cuda_model.Launch]]:
    """The launches of both passes at one of the benchmarks' shapes, in the terms of the CUDA kernels' model: bytes are
    those that a launch touches at least once."""
    from benchmarks.compile import layer_launches, read_resources

    compiled = {
        row.kernel: row
        for row in read_resources()
        if (row.target, row.shape, row.dtype, row.layer) == (f"sm_{gpu.architecture}", key, "float32", kind)
    }
    counted, made = COUNTS["triton"](kind, SHAPES[key])["both"], layer_launches(kind, SHAPES[key], torch.float32)
    found: dict[str, list[cuda_model.Launch]] = {}
    for direction, launches in made.items():
        found[direction] = []
        for launch in launches:
            count, row = counted.pop(0), compiled[launch.kernel.__name__]
            touched = [
                sum({what: size for what, size, is_written, _ in count.accesses if is_written == written}.values())
                for written in (False, True)
            ]
            resident = cuda_model.occupancy(gpu, 32 * row.warps, row.registers, row.shared)
            found[direction].append(
                cuda_model.Launch(count.name, math.prod(launch.grid), row.shared, resident, *touched)
            )
    return found


def launch_table(keys: Iterable[str]) -> Table:
    """Every launch of both GPU backends, side by side."""
    table = Table(title="Launches of the GPU kernels, counted and not measured: float32, no activation")
    for name in ("shape", "layer", "GPU", "direction", "backend", "kernel"):
        table.add_column(name)
    for name in ("blocks", "shared KiB", "occupancy", "MB read", "MB written"):
        table.add_column(name, justify="right")
    for key in keys:
        for kind in LAYERS:
            for gpu in cuda_model.GPUS:
                counted = {"triton": triton_counts(kind, key, gpu), "cuda": cuda_model.counts(kind, SHAPES[key], gpu)}
                for direction in ("forward", "backward"):
                    for backend, passes in counted.items():
                        for x in passes[direction]:
                            sizes = (f"{x.shared / 1024:.1f}", f"{x.occupancy:.0%}", f"{x.bytes_read / 1e6:.2f}")
                            where = (key, kind, gpu.name, direction, backend, x.kernel, str(x.blocks))
                            table.add_row(*where, *sizes, f"{x.bytes_written / 1e6:.2f}")
                    table.add_section()
    return table


def rows(kind: str, key: str) -> list[dict[str, object]]:
    """One row per implementation, pass and GPU."""
    shape = SHAPES[key]
    least = minimum_traffic(kind, shape)
    counted = {"reference": trace_reference(kind, shape)} | {name: count(kind, shape) for name, count in COUNTS.items()}
    found: list[dict[str, object]] = []
    for which in ("forward", "both"):
        for gpu in GPUS:
            base = predict(counted["reference"][which], gpu)
            for name, passes in counted.items():
                result = predict(passes[which], gpu)
                half = predict(passes[which], replace(gpu, cache=gpu.cache // 2))
                cold = sum(predict([launch], replace(gpu, cache=1 << 60)).traffic for launch in passes[which])
                found.append(
                    {
                        "layer": kind,
                        "shape": key,
                        "pass": "forward" if which == "forward" else "forward+backward",
                        "gpu": gpu.name,
                        "implementation": name,
                        "launches": result.launches,
                        "gflop": round(result.flops / 1e9, 3),
                        "mb": round(result.traffic / 1e6, 2),
                        "times_least_traffic": round(result.traffic / least[which], 3),
                        "times_least_half_cache": round(half.traffic / least[which], 3),
                        "times_least_cold": round(cold / least[which], 3),
                        "modelled_us": round(result.seconds * 1e6, 1),
                        "modelled_speed_up": round(base.seconds / result.seconds, 2),
                    }
                )
    return found


def run(arguments: argparse.Namespace) -> None:
    console = wide_console()
    table = Table(title="Modelled, not measured: one layer, float32")
    for column in ("layer", "shape", "pass", "GPU", "implementation"):
        table.add_column(column)
    numbers = ("launches", "GFLOP", "MB moved", "× least traffic", "half cache", "cold", "modelled µs", "speed-up")
    for column in numbers:
        table.add_column(column, justify="right")
    everything: list[dict[str, object]] = []
    for kind in LAYERS:
        for key in arguments.shapes:
            some = rows(kind, key)
            everything += some
            for k, row in enumerate(some):
                table.add_row(*(str(x) for x in row.values()), end_section=k == len(some) - 1)
    console.print(table)
    console.print(launch_table(arguments.shapes))
    console.print("\n".join(f"- {line}" for line in ASSUMPTIONS))
    if arguments.out:
        append_rows(arguments.out / "model.csv", everything)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="which shapes")
    parser.add_argument("--out", type=Path, help="folder for model.csv, to which rows are appended (default: none)")
    parser.set_defaults(run=run)
