import os

# Some CPUs report AMX but trap on its bfloat16 instructions; oneDNN reads this when torch is first imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import HealthCheck, settings

from magep_fast import use_backend

settings.register_profile(
    "reproducible",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def clean_state(monkeypatch):
    """Every test starts from the same seed and leaves the choice of backend as it found it."""
    monkeypatch.delenv("MAGEP_FAST_BACKEND", raising=False)
    torch.manual_seed(0)
    with use_backend("auto"):
        yield


@pytest.fixture
def uninitialised_memory_is_nan():
    """What torch.empty gives, and new_empty, by which the operators allocate."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.ops.aten.new_empty(torch.zeros(1), [7]).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
