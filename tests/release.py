"""python -m tests.release: builds the source distribution and the wheel, installs each in a fresh environment and runs
tests there against what was installed; the source tree is out of reach. `make release-check` calls it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ("setuptools>=77", "pybind11>=2.13", "cmake>=3.24", "ninja", "wheel")
CHOSEN = ("layers", "models", "swap", "convert", "ragged", "info", "numerics", "native", "chain", "backends", "fuzz")
"""Tests that need nothing of the source tree but `tests`, `benchmarks` and `examples`."""

MOST_WHEEL_BYTES = 5_000_000


def version() -> str:
    """The one source of the version."""
    (found,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return found


def check_versions() -> None:
    """What repeats the version, because it must, repeats the right one."""
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    logged = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if cited != version() or logged[0] != version():
        raise SystemExit(f"pyproject.toml says {version()}, CITATION.cff {cited}, CHANGELOG.md {logged[0]}")


def check_wheel(path: Path, native: bool) -> None:
    """The package and nothing else: no tests, no sources of the kernels; the libraries if it is to be native."""
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())
    modules = {f"magep_fast/{file.relative_to(ROOT / 'magep_fast')}" for file in (ROOT / "magep_fast").rglob("*.py")}
    modules |= {f"magep_fast/triton_kernels/{file.name}" for file in (ROOT / "triton_kernels").glob("*.py")}
    metadata = f"magep_fast-{version()}.dist-info"
    libraries = {name for name in names if name.endswith(".so")}
    expected = modules | {"magep_fast/py.typed"}
    expected |= {f"{metadata}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt", "licenses/LICENSE")}
    problems = [f"lacks {name}" for name in sorted(expected - names)]
    problems += [f"should not have {name}" for name in sorted(names - expected - libraries)]
    kinds = {Path(name).name.partition(".")[0] for name in libraries} - {"libmagep_fast_cuda"}
    if kinds != ({"_native", "libmagep_fast_ops"} if native else set()):
        problems.append(f"has the libraries {sorted(kinds)}")
    if native and path.stat().st_size > MOST_WHEEL_BYTES and "magep_fast/libmagep_fast_cuda.so" not in names:
        problems.append(f"has {path.stat().st_size} bytes; expected at most {MOST_WHEEL_BYTES}")
    if problems:
        raise SystemExit(f"{path.name} " + ", ".join(problems))


def check_sdist(path: Path) -> None:
    """All that git knows, but for what serves the repository itself, and nothing that was built."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = {name for name in listing.splitlines() if not name.startswith(".") and (ROOT / name).exists()}
    lacking, built = sorted(known - names), sorted(name for name in names if name.endswith((".so", ".pyc", ".o")))
    if lacking or built:
        raise SystemExit(f"{path.name} lacks {lacking}, should not have {built}")


def run(*command: str | Path, **options) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, **options)


def environment(folder: Path, torch_version: str) -> Path:
    """A fresh virtual environment with torch; its Python."""
    run(sys.executable, "-m", "venv", "--clear", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"torch=={torch_version}")
    return python


def check_installed(distribution: Path, work: Path, torch_version: str) -> None:
    """Installs a distribution, builds it if it is one of sources, and runs the chosen tests away from the tree."""
    python = environment(work / "venv", torch_version)
    isolation = []
    if distribution.suffix == ".gz":
        run(python, "-m", "pip", "install", "--quiet", *BUILD)
        isolation = ["--no-build-isolation"]
    path = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    run(python, "-m", "pip", "install", "--quiet", *isolation, f"{distribution}[test,bench]", env=path)
    away = work / "away"
    shutil.rmtree(away, ignore_errors=True)
    for package in ("tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / package, away / package, ignore=shutil.ignore_patterns("__pycache__"))
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    code = "import magep_fast, sys; print(magep_fast.__version__, magep_fast.__file__, magep_fast.available_backends())"
    run(python, "-c", f"{code}; sys.exit('cpu' not in magep_fast.available_backends())", cwd=away, env=alone)
    run(python, "-m", "magep_fast.info", cwd=away, env=alone)
    run(python, "-m", "examples.ragged_batch", cwd=away, env=alone)
    chosen = [f"tests/test_{name}.py" for name in CHOSEN]
    run(python, "-m", "pytest", "-q", "--numprocesses", "auto", "--dist", "loadgroup", *chosen, cwd=away, env=alone)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "release", help="folder for environments")
    parser.add_argument("--only", choices=("sdist", "wheel"), help="install one of the two")
    installed = importlib.metadata.version("torch").partition("+")[0]
    parser.add_argument("--torch", default=installed, help=f"version to install them with, default {installed}")
    arguments = parser.parse_args()
    check_versions()
    work = arguments.work.resolve()
    dist = work / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    path = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT, env=path)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    check_sdist(sdist)
    check_wheel(wheel, native=True)
    for kind, distribution in (("wheel", wheel), ("sdist", sdist)):
        if arguments.only in (None, kind):
            check_installed(distribution, work / kind, arguments.torch)
    print(f"release-check: {wheel.name} and {sdist.name} are good")


if __name__ == "__main__":
    main()
