"""python -m benchmarks.process_peak: a few training steps of one row in a process of its own, whose peak is printed."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from benchmarks.tables import WORKS, Subject
from benchmarks.training import keep_freed_memory

STEPS = 3


def main(table: str, model: str, device: str, threads: str) -> None:
    keep_freed_memory()
    torch.set_num_threads(int(threads))
    work = WORKS[table]
    entry = next(entry for entry in work.entries() if entry.name == model)
    data = work.made_networks(4 * work.batch_size).to(torch.device(device))
    subject = Subject(work, entry, data, torch.device(device))
    subject.trainer.run(STEPS)
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
