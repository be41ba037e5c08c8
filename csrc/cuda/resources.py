"""What ptxas says every CUDA kernel needs, as the table resources.csv beside this file.

python csrc/cuda/resources.py: compiles for every architecture of the table and writes it anew.
python csrc/cuda/resources.py build.log: reads what a build with -Xptxas=-v printed instead.
python csrc/cuda/resources.py --check build.log: writes nothing; fails if anything is spilled or, by the nvcc that the
table is of, differs from it.
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
    """Of one kernel on one architecture. `flags` are its other template arguments; shared is static, in bytes; nvcc is
    the release that compiled it."""

    kernel: str
    storage: str
    flags: str
    architecture: int
    registers: int
    shared: int
    spill_bytes: int
    nvcc: str


def nvcc_release() -> str:
    """Of the nvcc that is installed, such as "13.0"."""
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return version.partition("release ")[2].partition(",")[0]


def parse(log: str, nvcc: str) -> list[Resources]:
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
                nvcc,
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
    return parse(log, nvcc_release())


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


def differences(found: list[Resources]) -> list[Resources]:
    """What is spilled and, by the nvcc that the table is of, what the table has otherwise, for these architectures."""
    spilled = {row for row in found if row.spill_bytes > 0}
    architectures, table = {row.architecture for row in found}, read()
    if {row.nvcc for row in found} != {row.nvcc for row in table}:
        return sorted(spilled)
    return sorted(spilled | set(found) ^ {row for row in table if row.architecture in architectures})


def main() -> None:
    logs = [argument for argument in sys.argv[1:] if argument != "--check"]
    if logs:
        found = parse(Path(logs[0]).read_text(), nvcc_release())
    else:
        found = [row for architecture in ARCHITECTURES for row in compile_for(architecture)]
    if "--check" not in sys.argv:
        write(found)
    elif not found or differences(found):
        raise SystemExit(f"{len(found)} kernels found; these differ from {TABLE.name} or spill: {differences(found)}")


if __name__ == "__main__":
    main()
