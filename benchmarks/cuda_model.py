"""What the CUDA kernels will do on a GPU, counted and not measured: part of python -m benchmarks model.

Launches, blocks, occupancy and bytes of memory follow the plan of csrc/cuda/layers.cu for float32; registers are those
of csrc/cuda/resources.csv. Bytes are those that a launch touches at least once, as if the second-level cache kept what
several blocks read.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.layers import Shape

RESOURCES = Path(__file__).resolve().parent.parent / "csrc" / "cuda" / "resources.csv"
THREADS, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 256, 32, 64, 16
SLICE, READOUT_ROWS, READOUT_NETWORKS = 4, 32, 8
SMALL_NETWORK, DEFAULT_SHARED = 160 << 10, 48 << 10
NUMBER = 4  # bytes


@dataclass(frozen=True)
class Gpu:
    """What bounds the blocks of one multiprocessor; sizes in bytes, from the CUDA programming guide."""

    name: str
    architecture: int
    shared_per_block: int
    shared_per_multiprocessor: int
    registers: int = 65536
    threads: int = 2048
    blocks: int = 32


GPUS = (
    Gpu("A100 (sm_80)", 80, 163 << 10, 164 << 10),
    Gpu("H100 (sm_90)", 90, 227 << 10, 228 << 10),
)


@dataclass(frozen=True)
class Launch:
    """One launch. occupancy: resident threads of a multiprocessor over the most it can have."""

    kernel: str
    blocks: int
    shared: int
    occupancy: float
    bytes_read: int
    bytes_written: int


class Sizes:
    """Numbers of everything a layer touches, for one network unless said otherwise."""

    def __init__(self, widths: Sequence[int], d: int, e: int, equivariant: bool):
        self.n, self.d, self.e, self.equivariant = tuple(widths), d, e, equivariant
        n, L, n_0, n_L = self.n, len(widths) - 1, widths[0], widths[-1]
        self.L, self.n_0, self.n_L = L, n_0, n_L
        self.weights = d * sum(n[i] * n[i - 1] for i in range(1, L + 1))
        self.biases = d * sum(n[1:])
        self.staged = d * sum(n[i] * (n[i - 1] | 1) for i in range(1, L + 1))
        self.outputs = (self.weights + self.biases) // d * e if equivariant else e
        self.features = 3 * n_L * n_0 + L * n_L + 2 * (L - 1)
        through = [(n_L < n_0 or n_L == 1) and i < L for i in range(L + 1)]
        rank = [n_L if through[i] else n_0 for i in range(L + 1)]
        chains = sum((n_0 + i) * n[i] for i in range(1, L + 1)) + (L if equivariant else 1) * (n_0 + 1) * n_0
        saved = gradients = self.features
        if equivariant:
            chains += sum(n_L * n[t] for t in range(1, L))
            for i in range(2, L + 1):
                saved += (n[i - 1] + n_L * n[i]) if through[i] else (n_0 + 1) * n[i - 1]
                gradients += (rank[i] + 1) * (n[i] + n[i - 1])
            gradients += sum((3 * n_0 + i) * n[i] for i in range(1, L))
        self.chains, self.saved, self.gradients = d * chains, d * (chains + saved) + 1, d * gradients
        self.psi = (3 * L - 2 if equivariant else L) * (n_0 + 1) * n_L * d

    def matrices(self) -> list[tuple[int, int, int]]:
        """Rows, columns, and positions of one network of every output; the readout last."""
        n, L, n_0, n_L, d, e = self.n, self.L, self.n_0, self.n_L, self.d, self.e
        readout = (e * n_L if self.equivariant else e, self.features * d + 1, 1)
        if not self.equivariant:
            return [readout]
        found = []
        for i in range(1, L + 1):
            hidden = (3 * n_0 + i) * d
            if i == 1:
                found.append((e * n_0, hidden, n[1]))
            elif i < L:
                found.append((e, 3 * d, n[i] * n[i - 1]))
            else:
                found.append((e * n_L, 3 * n_L * d, n[L - 1]))
            found.append((e, hidden, n[i]) if i < L else readout)
        return found


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _tiles(rows: int, columns: int) -> int:
    return _ceil(rows, TILE_ROWS) * _ceil(columns, TILE_COLUMNS)


def _resources(kernel: str, flags: str, architecture: int) -> tuple[int, int]:
    """Registers of a thread and static shared memory of a float32 kernel."""
    with RESOURCES.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["kernel"], row["storage"], row["flags"]) == (kernel, "float", flags) and int(
                row["architecture"]
            ) == architecture:
                return int(row["registers"]), int(row["shared"])
    raise KeyError(f"{RESOURCES.name} has no kernel {kernel} ({flags}) for sm_{architecture}")


def occupancy(gpu: Gpu, threads: int, registers: int, shared: int) -> float:
    """Resident threads of a multiprocessor over the most it can have, for blocks of so many threads."""
    per_block = _ceil(registers, 8) * 8 * threads  # a warp's registers come in units of 256
    fitting = min(
        gpu.registers // per_block,
        gpu.threads // threads,
        gpu.shared_per_multiprocessor // (shared + 1024),
        gpu.blocks,
    )
    return fitting * threads / gpu.threads


def _launch(gpu: Gpu, kernel: str, flags: str, blocks: int, dynamic: int, read: int, written: int) -> Launch:
    registers, static = _resources(kernel, flags, gpu.architecture)
    shared = static + dynamic
    resident = occupancy(gpu, THREADS, registers, shared)
    return Launch(kernel, blocks, shared, resident, NUMBER * read, NUMBER * written)


def forward(gpu: Gpu, widths: Sequence[int], d: int, e: int, batch: int, equivariant: bool) -> list[Launch]:
    """The launches of one layer's forward pass."""
    s = Sizes(widths, d, e, equivariant)
    parameters = sum(rows * columns for rows, columns, _ in s.matrices()) + s.psi
    features, outputs, saved = batch * (s.weights + s.biases), batch * s.outputs, batch * s.saved
    resident, streamed = NUMBER * (s.saved + s.staged), NUMBER * s.saved
    if resident <= SMALL_NETWORK and streamed <= gpu.shared_per_block:
        fits = resident <= gpu.shared_per_block
        blocks, shared = batch * _ceil(e, SLICE), resident if fits else streamed
        flags = "yes" if fits else "no"
        return [_launch(gpu, "layer_fused", flags, blocks, shared, features + parameters, outputs + saved)]
    *matrices, (readout_rows, _, _) = s.matrices()
    tiles = sum(_tiles(rows, positions) for rows, _, positions in matrices) + _ceil(readout_rows, READOUT_ROWS)
    mixed = batch * s.weights if equivariant else 0
    return [
        _launch(gpu, "layer_chain", "", batch * d, 0, features + s.psi, saved),
        _launch(gpu, "layer_mix", "", batch * tiles, 0, mixed + saved + parameters - s.psi, outputs),
    ]


def backward(gpu: Gpu, widths: Sequence[int], d: int, e: int, batch: int, equivariant: bool) -> list[Launch]:
    """The launches of one layer's backward pass, without an activation."""
    s = Sizes(widths, d, e, equivariant)
    matrices = s.matrices()
    parameters = sum(rows * columns for rows, columns, _ in matrices)
    readout_rows, readout_columns, _ = matrices[-1]
    outputs, weights, saved = batch * s.outputs, batch * s.weights, batch * s.saved
    small = NUMBER * (s.saved + s.staged) <= SMALL_NETWORK
    chain_shared = NUMBER * (2 * s.chains + s.staged) // d
    small_chain = chain_shared <= DEFAULT_SHARED

    blocks, parts, summed = 0, 0, 0
    for rows, columns, positions in matrices:
        tiles, samples = _tiles(rows, columns), batch * positions
        wanted = min(_ceil(128, tiles), _ceil(samples, 256))
        count = _ceil(samples, _ceil(_ceil(samples, wanted), TILE_DEPTH) * TILE_DEPTH)
        blocks += tiles * count
        parts += rows * columns * count
        summed += rows * columns if count > 1 else 0
    partial = parts - (parameters - summed)
    blocks += _ceil(readout_columns, THREADS) * _ceil(batch, READOUT_NETWORKS)
    read = outputs + (weights if equivariant else 0) + saved + readout_rows * readout_columns
    launches = [_launch(gpu, "matrix_gradients", "", blocks, 0, read, parts + batch * s.features * d)]
    if equivariant:
        channels = 4 if small else 10
        blocks = batch * 2 * (s.L - 1) * _ceil(d, channels)
        rectangle = 16 * 17 if small else 8 * 9
        shared = NUMBER * 2 * channels * rectangle
        flags, written = "yes" if small else "no", weights + batch * (s.gradients - s.features * d)
        launches.append(_launch(gpu, "data_gradients", flags, blocks, shared, outputs + saved + parameters, written))
    read = weights + saved + batch * s.gradients + s.psi + (weights if equivariant else 0)
    psi_parts, psi_summed = batch * s.psi, s.psi if batch > 1 else 0
    written = weights + batch * s.biases + psi_parts + (0 if small_chain else batch * s.chains)
    flags = "yes" if small_chain else "no"
    launches.append(
        _launch(gpu, "chain_gradients", flags, batch * d, chain_shared if small_chain else 0, read, written)
    )
    if summed + psi_summed > 0:
        blocks = _ceil(psi_summed, THREADS) + _ceil(summed, THREADS)
        read = partial + (psi_parts if batch > 1 else 0)
        launches.append(_launch(gpu, "sum_parts", "", blocks, 0, read, summed + psi_summed))
    return launches


def counts(kind: str, shape: Shape, gpu: Gpu) -> dict[str, list[Launch]]:
    """The launches of both passes of a layer with as many channels out as in."""
    given = (gpu, shape.widths, shape.channels, shape.channels, shape.batch_size, kind == "equivariant")
    return {"forward": forward(*given), "backward": backward(*given)}
