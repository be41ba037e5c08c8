"""The least time a layer can take on this machine: its arithmetic at the rate of a large matrix product, plus each
input read and each output written once at the rate of a large copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.measure import CPU, finisher, time_interleaved


@dataclass(frozen=True)
class Machine:
    """Rates measured in this run: flops of a large product and bytes of a large copy per second.

    Args:
        one_thread: flops of the processor with one thread. The cores of a virtual machine may be threads of one core,
            and all threads then do little more.
    """

    flops: float
    warm_bytes: float
    fresh_bytes: float
    one_thread: float

    @staticmethod
    def measure(repeats: int = 20, device: torch.device = CPU) -> Machine:
        n = 512 if device.type == "cpu" else 4096
        a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
        source = torch.randn((16 if device.type == "cpu" else 256) << 20, device=device)
        target = torch.empty_like(source)
        threads, left, right = torch.get_num_threads(), a.to(CPU)[:512, :512], b.to(CPU)[:512, :512]

        def one_thread() -> None:
            torch.set_num_threads(1)
            left @ right
            torch.set_num_threads(threads)

        product, alone, warm, fresh = time_interleaved(
            [lambda: a @ b, one_thread, lambda: target.copy_(source), source.clone], repeats, finish=finisher(device)
        )
        size, flops = source.nbytes, 2 * n**3
        return Machine(flops / product.p50, size / warm.p50, size / fresh.p50, 2 * 512**3 / alone.p50)


def equivariant_flops(widths: tuple[int, ...], d: int, e: int, batch: int) -> float:
    """Forward flops that the algebra leaves: docs/mathematics.md."""
    L, n_0, n_L = len(widths) - 1, widths[0], widths[-1]
    middle = sum(
        e * d * widths[i] * widths[i - 1] * (1 + min(n_L, n_0 + 1, 2)) + d * widths[i] * widths[i - 1] * min(n_0, n_L)
        for i in range(2, L)
    )
    hidden_biases = sum(e * d * widths[i] * (n_0 + i) for i in range(1, L))
    first = e * d * widths[1] * n_0 * (n_0 + 1) + e * d * n_0**3
    last = e * d * n_L * widths[L - 1] * (n_L + n_0 + 1) + e * d * n_L**2 * (n_0 + 1)
    readout = e * n_L * d * (3 * n_L * n_0 + L * n_L + 2 * L)
    return 2 * batch * (middle + hidden_biases + first + last + readout + chain_macs(widths, d, both=True))


def invariant_flops(widths: tuple[int, ...], d: int, e: int, batch: int) -> float:
    """Forward flops of the invariant layer."""
    L, n_0, n_L = len(widths) - 1, widths[0], widths[-1]
    readout = e * d * (3 * n_L * n_0 + L * n_L + 2 * L)
    return 2 * batch * (readout + chain_macs(widths, d, both=False))


def chain_macs(widths: tuple[int, ...], d: int, both: bool) -> float:
    n_0, n_L = widths[0], widths[-1]
    return sum(
        d * widths[i] * widths[i - 1] * (n_0 + n_L + i if both else min(n_0 + i, n_L)) for i in range(2, len(widths))
    )


def floor_seconds(
    machine: Machine, forward_flops: float, input_bytes: int, output_bytes: int, parameter_bytes: int
) -> float:
    """Forward and backward: three times the arithmetic; inputs are read twice and their gradients written, outputs
    written and their gradients read, parameters read twice and their gradients written."""
    read = 2 * input_bytes + output_bytes + 2 * parameter_bytes
    written = output_bytes + input_bytes + parameter_bytes
    return 3 * forward_flops / machine.flops + read / machine.warm_bytes / 2 + written / machine.fresh_bytes
