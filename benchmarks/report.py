"""Where results go: one CSV per benchmark, a row per measurement, with the environment it was made in."""

from __future__ import annotations

import csv
import platform
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console

import magep_fast


def wide_console() -> Console:
    """A console whose tables keep their columns when the output goes to a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=170)


def environment() -> dict[str, str]:
    """The columns that say where and with what a row was measured."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = f"{names[0]} x{len(names)}" if names else cpu
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "magep_fast": magep_fast.__version__,
    }


def check_columns(path: Path, row: dict[str, object]) -> None:
    """Raises ValueError if there is a CSV at `path` with other columns than those of the row and the environment."""
    columns = [*row, *environment()]
    if path.exists():
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
        if found != columns:
            raise ValueError(f"{path} has the columns {found}; expected {columns}. Move it away or give another folder")


def append_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Adds rows to a CSV, which is created with a header; a file with other columns is not touched."""
    if not rows:
        return
    check_columns(path, rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *environment()])
        if new:
            writer.writeheader()
        writer.writerows(row | environment() for row in rows)
