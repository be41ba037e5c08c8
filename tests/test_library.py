import pytest
import torch

from magep_fast import MagepInvariant, WeightSpace, available_backends
from magep_fast.ops import library
from magep_fast.ops.backends import choose_backend
from tests.helpers import random_features


@pytest.fixture
def library_at(monkeypatch):
    """Looks for the library elsewhere for the length of a test."""

    def move(path):
        monkeypatch.setattr(library, "_OPS", path)
        library.load_library()

    yield move
    monkeypatch.undo()
    library.load_library()


def assert_falls_back():
    assert "cpu" not in available_backends()
    assert choose_backend("auto", torch.device("cpu"), torch.float32).name == "torch"
    with pytest.raises(RuntimeError, match=r"backend 'cpu' cannot run here: .*\. Available: "):
        choose_backend("cpu", torch.device("cpu"), torch.float32)
    space = WeightSpace((2, 3, 2))
    layer = MagepInvariant(space, 2, 3)
    assert layer(random_features(space, dtype=torch.float32)).shape == (2, 3)


def test_absent_library(library_at, tmp_path):
    library_at(tmp_path / "libmagep_fast_ops.so")
    assert "built without a C++ compiler or with MAGEP_FAST_NO_NATIVE=1" in library.missing_library()
    assert_falls_back()


def test_library_that_does_not_load(library_at, tmp_path):
    path = tmp_path / "libmagep_fast_ops.so"
    path.write_bytes(b"no library")
    library_at(path)
    reason = library.missing_library()
    assert f"libmagep_fast_ops.so does not load with torch {torch.__version__}: " in reason
    assert str(path) in reason
    assert_falls_back()


def test_cause_is_found_once(library_at, tmp_path):
    library_at(tmp_path / "libmagep_fast_ops.so")
    before = library.missing_library()
    (tmp_path / "libmagep_fast_ops.so").write_bytes(b"too late")
    assert library.missing_library() is before
