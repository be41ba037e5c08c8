"""What ptxas says every CUDA kernel needs, as the table resources.csv beside this file.

python csrc/cuda/resources.py             compiles for every architecture of the table and writes it anew
python csrc/cuda/resources.py build.log   reads what a build with -Xptxas=-v printed instead
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass, fields
from pathlib import Path

HERE = Path(__file__).resolve().parent
TABLE = HERE / "resources.csv"
SOURCES = (HERE / "chain.cu", HERE / "layers.cu")
ARCHITECTURES = (80, 86, 89, 90, 100, 120)

_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for 'sm_(?P<architecture>\d+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers"
    r"(?P<rest>[^\n]*)",
    re.DOTALL,
)
_KERNEL = re.compile(
    r"_ZN5magep4cuda\d+(?P<name>\D+?)I(?P<storage>f|d|13__nv_bfloat16|6__half)(?P<flags>(?:Lb[01]E)*)EEv"
)
_STORAGE = {"f": "float", "d": "double", "13__nv_bfloat16": "bfloat16", "6__half": "half"}


@dataclass(frozen=True, order=True)
class Resources:
    """Of one kernel on one architecture. `flags` are its other template arguments; shared is static, in bytes."""

    kernel: str
    storage: str
    flags: str
    architecture: int
    registers: int
    shared: int
    spill_bytes: int


def parse(log: str) -> list[Resources]:
    """The kernels in the output of ptxas -v."""
    found = set()
    for entry in _ENTRY.finditer(log):
        name = _KERNEL.match(entry["symbol"])
        assert name, f"not a kernel of csrc/cuda: {entry['symbol']}"
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        found.add(
            Resources(
                name["name"],
                _STORAGE[name["storage"]],
                " ".join("yes" if flag == "1" else "no" for flag in re.findall(r"Lb([01])E", name["flags"])),
                int(entry["architecture"]),
                int(entry["registers"]),
                int(shared[1]) if shared else 0,
                int(entry["stores"]) + int(entry["loads"]),
            )
        )
    return sorted(found)


def compile_for(architecture: int) -> list[Resources]:
    """The kernels as nvcc compiles them now."""
    log = ""
    with tempfile.TemporaryDirectory() as directory:
        for source in SOURCES:
            command = ["nvcc", "-std=c++17", f"-arch=sm_{architecture}", "-Xptxas=-v", "-cubin", str(source)]
            run = subprocess.run([*command, "-o", f"{directory}/kernels"], capture_output=True, text=True, check=True)
            log += run.stderr + run.stdout
    return parse(log)


def read() -> list[Resources]:
    """The committed table."""
    with TABLE.open(newline="") as file:
        return [
            Resources(*(int(row[f.name]) if f.type == "int" else row[f.name] for f in fields(Resources)))
            for row in csv.DictReader(file)
        ]


def write(table: list[Resources]) -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(f.name for f in fields(Resources))
        writer.writerows(astuple(row) for row in sorted(table))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(parse(Path(sys.argv[1]).read_text()))
    else:
        write([row for architecture in ARCHITECTURES for row in compile_for(architecture)])
