"""Builds the wheel: CMakeLists.txt describes the native libraries, this file calls it.

Without a compiler, or with MAGEP_FAST_NO_NATIVE=1, a pure-Python wheel results.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
COMPILERS = (os.environ.get("CXX", "c++"), "g++", "clang++")


def reason_for_pure_python() -> str | None:
    """Why this build leaves the native libraries out, or None."""
    if os.environ.get("MAGEP_FAST_NO_NATIVE", "0") not in ("", "0"):
        return "MAGEP_FAST_NO_NATIVE is set"
    if not any(shutil.which(compiler) for compiler in COMPILERS):
        return f"no C++ compiler found (looked for {', '.join(COMPILERS)})"
    return None


class CMakeBuild(build_ext):
    """Runs CMake once and installs its libraries into the package."""

    def run(self) -> None:
        missing = [name for name in ("torch", "pybind11") if importlib.util.find_spec(name) is None]
        if missing:
            raise SystemExit(
                f"magep-fast: {' and '.join(missing)} not found in the build environment. Install with build isolation "
                "(the default of pip install), or install the packages first, or set MAGEP_FAST_NO_NATIVE=1."
            )
        package = ROOT if self.inplace else Path(self.build_lib).resolve()
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        options = {"Python_EXECUTABLE": sys.executable, "MAGEP_VERSION": self.distribution.get_version()}
        definitions = [f"-D{name}={value}" for name, value in options.items()] + os.environ.get(
            "CMAKE_ARGS", ""
        ).split()
        # --fresh: a build environment made anew has its torch elsewhere than the last one.
        cmake = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "--fresh", *definitions]
        try:
            subprocess.run(cmake, check=True)
            subprocess.run(["cmake", "--build", str(build)], check=True)
            subprocess.run(["cmake", "--install", str(build), "--prefix", str(package / "magep_fast")], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(
                f"magep-fast: the native build failed: {error}. To install without native kernels, "
                "set MAGEP_FAST_NO_NATIVE=1."
            ) from error

    def get_outputs(self) -> list[str]:
        return [str(path) for path in (Path(self.build_lib) / "magep_fast").glob("*.so")]

    def copy_extensions_to_source(self) -> None:
        """An in-place build has installed into the source tree already."""


reason = reason_for_pure_python()
if reason:
    print(f"magep-fast: {reason}: building without native kernels, the torch backend will serve.", file=sys.stderr)

setup(
    packages=["magep_fast", "magep_fast.ops", "magep_fast.triton_kernels"],
    package_dir={"magep_fast": "magep_fast", "magep_fast.triton_kernels": "triton_kernels"},
    package_data={"magep_fast": ["py.typed"]},
    ext_modules=[] if reason else [Extension("magep_fast._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
