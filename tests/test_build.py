import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import release

ROOT = Path(__file__).resolve().parent.parent


def run(*command, **options):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, **options)


@pytest.fixture
def repository(tmp_path):
    """A copy of what git knows, without anything that was built."""
    listing = run("git", "ls-files", "-z", cwd=ROOT)
    if listing.returncode != 0:
        pytest.skip("needs a git checkout")
    copy = tmp_path / "repository"
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def without_compilers(directory):
    """An environment whose PATH has Python's own directory and nothing that compiles."""
    (directory / "bin").mkdir()
    (directory / "bin" / "python").symlink_to(sys.executable)
    return {"PATH": str(directory / "bin"), "CXX": "/nonexistent"}


@pytest.mark.parametrize("cause", ["variable", "compiler"])
def test_pure_python_wheel(repository, tmp_path, cause):
    if cause == "variable":
        setting, message = {"MAGEP_FAST_NO_NATIVE": "1"}, "MAGEP_FAST_NO_NATIVE is set"
    else:
        setting, message = without_compilers(tmp_path), "no C++ compiler found (looked for /nonexistent, g++, clang++)"
    command = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--verbose")
    build = run(*command, "--wheel-dir", tmp_path, repository, env=os.environ | setting)
    assert build.returncode == 0, build.stdout + build.stderr
    explanation = f"magep-fast: {message}: building without native kernels, the torch backend will serve."
    assert explanation in build.stdout + build.stderr

    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    release.check_wheel(wheel, native=False)

    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = "import magep_fast; print(magep_fast.__file__); print(*magep_fast.available_backends())"
    use = run(sys.executable, "-c", code, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")})
    assert use.returncode == 0, use.stderr
    assert use.stdout.split("\n")[:2] == [str(tmp_path / "installed" / "magep_fast" / "__init__.py"), "reference torch"]


def test_sdist(repository, tmp_path):
    build = run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path / "dist", repository)
    assert build.returncode == 0, build.stdout + build.stderr
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    release.check_sdist(sdist)


def test_contents_of_distributions_are_judged(tmp_path):
    wheel = tmp_path / "magep_fast-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("magep_fast/__init__.py", "")
        archive.writestr("tests/test_layers.py", "")
        archive.writestr("magep_fast/_native.so", "")
    with pytest.raises(
        SystemExit, match=r"lacks .*licenses/LICENSE.*should not have tests/test_layers.py.*has the lib"
    ):
        release.check_wheel(wheel, native=True)


def test_one_version():
    release.check_versions()


def test_import_takes_less_than_a_second_beyond_torch():
    code = """
import sys, time, torch
start = time.perf_counter()
import magep_fast
print(time.perf_counter() - start)
print(*({"triton", "safetensors", "rich", "matplotlib", "nfn", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""
    runs = [run(sys.executable, "-c", code) for _ in range(3)]
    assert all(one.returncode == 0 for one in runs), runs[0].stderr
    seconds, loaded = zip(*(one.stdout.split("\n")[:2] for one in runs), strict=True)
    assert min(map(float, seconds)) < 1, seconds  # 0.1 s on a machine with nothing else to do
    assert set(loaded) == {""}
