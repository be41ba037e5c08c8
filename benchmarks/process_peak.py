"""python -m benchmarks.process_peak: a few training steps of one row in a process of its own, whose peak is printed."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import torch

STEPS = 3


def measure(table: str, model: str, device: str, threads: int) -> float:
    """Megabytes that a process training this row holds at its peak, Python and torch included.

    On a GPU, what torch's allocator reserves there.
    """
    command = [sys.executable, "-m", "benchmarks.process_peak", table, model, device, str(threads)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"a process of its own ended with code {result.returncode}: {reason[-1]}")
    return float(result.stdout.split()[-1])


def main(table: str, model: str, device: str, threads: str) -> None:
    from benchmarks.tables import WORKS, Subject
    from benchmarks.training import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(int(threads))
    work = WORKS[table]
    entry = next(entry for entry in work.entries() if entry.name == model)
    data = work.made_networks(4 * work.batch_size).to(torch.device(device))
    subject = Subject(work, entry, data, torch.device(device))
    for _ in range(STEPS):
        subject.trainer.step()
    print((torch.cuda.max_memory_reserved() if device.startswith("cuda") else peak_bytes()) / 1e6)


def peak_bytes() -> int:
    """The most memory this process has held. On Linux from /proc: getrusage there starts from the parent's peak."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(*sys.argv[1:])
