"""What training jobs meet: workers, neighbours, signals, too little memory, the wish for determinism."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from magep_fast import MagepEquivariant, MagepInvariant, MonomialEquivariant, WeightSpace, use_backend
from tests import soak
from tests.helpers import BACKENDS, assert_same, gradients, random_features
from tests.test_tasks import TINY_CONFIG, write_zoo

ROOT = Path(__file__).parent.parent
SPACE = WeightSpace((3, 20, 17, 4))
KINDS = (MagepEquivariant, MagepInvariant, MonomialEquivariant)


def python(code, *arguments, **options):
    """A process that runs the code, able to import what this one can."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        **options,
    )


class Gradients(Dataset):
    """Item k is the gradient of a layer on networks drawn with seed k, computed where the item is asked for."""

    def __init__(self, kind):
        torch.manual_seed(0)
        self.layer = kind(SPACE, 4, 4)

    def __len__(self):
        return 6

    def __getitem__(self, k):
        torch.manual_seed(k)
        return gradients(self.layer, random_features(SPACE, 4, 3, torch.float32))[1][0]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_layers_run_in_workers_of_a_data_loader(start):
    kinds, workers = (KINDS, 2) if start == "fork" else (KINDS[:1], 1)  # a spawned worker takes its time to import
    for kind in kinds:
        data = Gradients(kind)
        torch.set_num_threads(2)  # workers are forked from a process whose threads have worked
        try:
            expected = [data[k] for k in range(len(data))]
            loader = DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=start)
            for found, wanted in zip(loader, expected, strict=True):
                assert_same(found, wanted, 1e-5)
        finally:
            torch.set_num_threads(1)


TRAIN = """
    import hashlib, sys, torch
    from magep_fast import MagepEquivariant, MagepInvariant, WeightSpace
    from tests.helpers import random_features

    torch.manual_seed(0)
    torch.set_num_threads(2)
    space = WeightSpace((3, 20, 17, 4))
    model = torch.nn.Sequential(MagepEquivariant(space, 4, 4, activation="relu"), MagepInvariant(space, 4, 2))
    optimiser = torch.optim.Adam(model.parameters())
    for _ in range(10):
        optimiser.zero_grad()
        model(random_features(space, 4, 8, torch.float32)).square().mean().backward()
        optimiser.step()
    numbers = torch.cat([x.detach().flatten() for x in model.parameters()])
    print(hashlib.sha256(numbers.numpy().tobytes()).hexdigest())
"""


def test_processes_side_by_side_do_not_disturb_one_another():
    together = [python(TRAIN) for _ in range(2)]
    outcomes = [process.communicate(timeout=240) for process in together]
    assert [process.returncode for process in together] == [0, 0], outcomes
    assert outcomes[0][0] == outcomes[1][0] and len(outcomes[0][0]) == 65


def train_command(data, out, steps):
    config = out.parent / "config.json"
    config.write_text(json.dumps(TINY_CONFIG | {"steps": steps, "evaluate_every": 20}))
    command = [sys.executable, "-m", "benchmarks", "train", "generalization", "--data", data, "--out", out]
    return [str(word) for word in (*command, "--config", config, "--threads", 1)]


def interrupt(process):
    """Ctrl-C, again if nothing happens: Python ignores one that it meets in a finaliser. Returns what was written."""
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=30)[1]
    process.kill()
    raise AssertionError("interrupted five times and still running")


def test_training_stopped_by_a_signal_keeps_its_checkpoint_and_goes_on(tmp_path):
    data, stopped, whole = write_zoo(tmp_path / "zoo"), tmp_path / "stopped", tmp_path / "whole"
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell's background jobs ignore SIGINT, and so would the child.
    restore = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(train_command(data, stopped, 10**6), **options, preexec_fn=restore)
    checkpoint = stopped / "generalization" / "zoo" / "MAGEP" / "seed0" / "checkpoint.pt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    errors = interrupt(process)
    assert process.returncode == 130 and errors.strip() == "stopped; what was finished is kept", errors
    done = torch.load(checkpoint, weights_only=True)["state"]["step"]
    assert done > 0 and done % 20 == 0

    for out in (stopped, whole):
        finished = subprocess.run(train_command(data, out, done + 20), **options, timeout=240)
        assert finished.returncode == 0, finished.stderr
    results = [json.loads(next(out.glob("**/result.json")).read_text()) for out in (stopped, whole)]
    assert results[0]["test"] == results[1]["test"] and results[0]["steps"] == results[1]["steps"] == done + 20


LOW_MEMORY = """
    import resource, sys, torch
    from magep_fast import MagepEquivariant, MagepInvariant, MonomialEquivariant, WeightSpace
    from tests.helpers import random_features, tensors_of

    torch.set_num_threads(2)
    space, d = WeightSpace((16, 64, 64, 64, 10)), 32
    small = random_features(space, d, 2, torch.float32)
    large = random_features(space, d, 64, torch.float32).map(lambda x: x.requires_grad_())
    for kind in (MagepEquivariant, MagepInvariant, MonomialEquivariant):
        layer = kind(space, d, d)
        sum(x.sum() for x in tensors_of(layer(small.map(lambda x: x.requires_grad_())))).backward()
        for megabytes in (0, 20, 50, 100, 400):
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + megabytes * 2**20, resource.RLIM_INFINITY))
            try:
                sum(x.sum() for x in tensors_of(layer(large))).backward()
                print(kind.__name__, megabytes, "enough")
            except (MemoryError, RuntimeError) as error:
                print(kind.__name__, megabytes, type(error).__name__, str(error).splitlines()[0])
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    expected = layer(small)
    assert all(x.isfinite().all() for x in expected.tensors())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_too_little_memory_is_an_error_that_says_so():
    process = python(LOW_MEMORY)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, f"{output}\n{errors}"
    lines = output.splitlines()
    assert len(lines) == 15
    failed = [line for line in lines if not line.endswith("enough")]
    assert len(failed) >= 6, output
    for line in failed:
        assert "memory" in line.split(maxsplit=3)[3].lower(), line
    assert any("MemoryError magep_fast: not enough memory for" in line for line in failed), output


LOW_MEMORY_FOR_COPIES = """
    import resource, torch
    from magep_fast import MagepInvariant, WeightSpace
    from tests.helpers import random_features

    space = WeightSpace((2, 8, 1))
    small = random_features(space, 1, 1, torch.bfloat16)
    many = small.map(lambda x: x.expand(2**21, *x.shape[1:]))
    layers = [MagepInvariant(space, 1, e, dtype=torch.bfloat16) for e in (1, 2**21)]
    layers[0](small)
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 20 * 2**20, resource.RLIM_INFINITY))
    for layer, features in zip(layers, (many, small)):
        try:
            layer(features)
        except MemoryError as error:
            print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_too_little_memory_for_a_copy_is_the_same_error():
    """Features that are not contiguous, then parameters that are not in the type of computation."""
    output, errors = python(LOW_MEMORY_FOR_COPIES).communicate(timeout=240)
    shapes = ("[2097152, 1, 8, 2]", "[2097152, 11]")
    assert output.splitlines() == [f"magep_fast: not enough memory for a tensor of shape {x}" for x in shapes], errors


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_algorithms(kind):
    """Nothing refuses to run, fresh memory that torch fills with NaN is never read, and the bits repeat."""
    features, layer = random_features(SPACE, 4, 5, torch.float32), kind(SPACE, 4, 4)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    try:
        for backend in BACKENDS:
            with use_backend(backend):
                first_output, first = gradients(layer, features)
                again_output, again = gradients(layer, features)
            assert_same(again_output, first_output)
            for x, y in zip(again, first, strict=True):
                assert_same(x, y)
                assert x.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)


def test_a_short_soak_runs():
    report = soak.soak(minutes=0.1, warm_up=0.03)
    assert report.steps > 2 and report.finite
    assert len(report.samples) >= 2


def test_a_soak_tells_growth_from_rest():
    flat = soak.Report(10, [soak.Sample(60.0 * k, 500.0 + (k % 3)) for k in range(20)], True)
    leak = soak.Report(10, [soak.Sample(60.0 * k, 500.0 + 2.0 * k) for k in range(20)], True)
    assert flat.is_flat() and not leak.is_flat()
    assert not soak.Report(10, flat.samples, False).is_good()
