"""The property tests of the CPU backend and the suite for GPUs, with the CUDA operators and kernels run on the host.

The library is built anew when its sources change, in build/, which takes a compiler and a minute.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from magep_fast.ops.library import missing_library

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda-on-host"
# Tests of numbers and of messages; those of threads and of the linear layer are the CPU backend's own.
SELECTED = {
    "test_backends.py": "agrees and cpu",
    "test_chain.py": "cpu and chain_is",
    "test_gpu.py": "cuda",
    "test_native.py": "not Monomial and not linear and (refuse or activations_agree or activations_keep or edges "
    "or low_precision or memory_layout or uninitialised or earlier_calls or second_derivatives or depend_on_its_batch)",
}


def run(*command, **options):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, **options)


@pytest.fixture(scope="module")
def library():
    """The path of the operators on the host."""
    if missing_library() is not None:
        pytest.skip(missing_library())
    bin_directory = Path(sys.executable).parent
    path = f"{bin_directory}{os.pathsep}{os.environ['PATH']}"
    fcntl = pytest.importorskip("fcntl", reason="needs locks of files as Unix has them")
    missing = [tool for tool in ("cmake", "ninja", "c++") if shutil.which(tool, path=path) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    environment = os.environ | {"PATH": path}
    options = ("-DMAGEP_CUDA_ON_HOST=ON", "-DMAGEP_WITH_CUDA=OFF", "-DMAGEP_WERROR=ON")
    configure = ("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *options)
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # of two processes one builds, the other finds it built
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, ("cmake", "--build", BUILD, "-j1", "--target", "magep_fast_cuda_on_host")):
            made = run(*command, env=environment)
            assert made.returncode == 0, made.stdout + made.stderr
    return BUILD / "libmagep_fast_cuda_on_host.so"


@pytest.mark.parametrize("name", SELECTED)
def test_cpu_property_tests_hold_for_cuda(name, library):
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.cuda_on_host", f"tests/{name}")
    environment = os.environ | {"MAGEP_CUDA_ON_HOST": str(library), "PYTHONPATH": str(ROOT)}
    tests = run(*command, "-k", SELECTED[name], "--show-capture=no", env=environment)
    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "new kernel: registered at csrc/cuda/ops.cpp" in tests.stdout + tests.stderr
