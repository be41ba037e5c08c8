"""How everything is measured: interleaved, in one process, medians, ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median and the 20th and 80th percentile."""

    p20: float
    p50: float
    p80: float


def time_interleaved(
    functions: Sequence[Callable[[], object]],
    repeats: int,
    warmup: int = 3,
    progress: Callable[[], object] = lambda: None,
    finish: Callable[[], object] = lambda: None,
) -> list[Timing]:
    """Times the functions in turn, call by call, so that whatever else the machine does falls on all alike. `finish` is
    called inside the time of each: on a GPU it waits for the work to end."""
    for function in functions:
        for _ in range(warmup):
            function()
    finish()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for seconds, function in zip(times, functions, strict=True):
            start = time.perf_counter()
            function()
            finish()
            seconds.append(time.perf_counter() - start)
        progress()
    return [timing(seconds) for seconds in times]


def timing(seconds: list[float]) -> Timing:
    """The percentiles of a list of times."""
    cuts = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    return Timing(cuts[1], cuts[4], cuts[7])


def finisher(device: torch.device) -> Callable[[], object]:
    """What waits for a device."""
    return (lambda: None) if device.type == "cpu" else lambda: torch.cuda.synchronize(device)


def peak_memory(function: Callable[[], object], device: torch.device = CPU) -> int:
    """Bytes held at the peak of one call beyond those held before it: from the profiler's allocation events, on a GPU
    from the allocator's statistics."""
    function()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results = profiler.profiler.kineto_results
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    held = peak = 0
    for _, nbytes in sorted(events, key=lambda event: event[0]):
        held += nbytes
        peak = max(peak, held)
    return peak


class _OpCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        return func(*args, **(kwargs or {}))


def count_ops(function: Callable[[], object]) -> int:
    """Torch ops that one call dispatches, forward and backward; views, which compute nothing, are not counted."""
    with _OpCounter() as counter:
        function()
    return counter.count


def set_threads(threads: int | None) -> int:
    """Sets torch's thread count if one is given; returns the one in force."""
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()
