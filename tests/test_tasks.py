"""The tasks end to end in a tiny form, and the loop they share."""

import argparse
import csv
import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from benchmarks.data import DataError, Manifest, ShardedNetworks, Source
from benchmarks.data.siren import Siren
from benchmarks.data.stand_ins import make_accuracies, make_networks
from benchmarks.data.zoo import COLUMNS as ZOO_COLUMNS
from benchmarks.tasks import accuracy, command, paper
from benchmarks.tasks.configs import CONFIGS, read_config, settings
from benchmarks.tasks.generalization import add_copies, generalization, kendall_tau
from benchmarks.tasks.inr_edit import edited, unedited
from benchmarks.tasks.loop import Run, Settings, World
from magep_fast import ABLATION, GroupElement, WeightSpace
from magep_fast.models import CnnGeneralization, UnitPaths, path_sums
from tests.helpers import assert_same

CNN = WeightSpace((1, 4, 4, 3), (9, 9, 1))
TINY = Settings(
    steps=12, batch_size=8, learning_rate=1e-3, evaluate_every=4, model={"channels": 4, "invariants": 4, "hidden": 8}
)
TINY_CONFIG = {"steps": 6, "batch_size": 8, "learning_rate": 1e-3, "evaluate_every": 3}


def write_zoo(folder, activation="relu", shards=3, each=32):
    """Networks whose accuracy can be read off their last bias."""
    columns = {"accuracy": "", "split": ""}
    data = ShardedNetworks(folder, Manifest(CNN, activation, "test", {"images": "made"}, columns, shards))
    for shard in range(shards):
        networks = make_networks(CNN, each, seed=shard)
        split = torch.tensor([0, 0, 0, 0, 0, 0, 1, 2], dtype=torch.uint8).repeat(each // 8)
        data.write(shard, networks, {"accuracy": make_accuracies(networks).flatten(), "split": split})
    return folder


def write_sirens(folder, colours=1, count=48):
    space, siren = WeightSpace((2, 6, 6, colours)), Siren()
    columns = {"label": "", "image": "", "split": ""}
    data = ShardedNetworks(folder, Manifest(space, "sin", "test", {"images": "mnist"}, columns, 1))
    networks = siren.initialise(space, count, torch.Generator().manual_seed(0))
    image = siren.render(networks, 8, 8).clamp(0, 1).mul(255).round().to(torch.uint8)
    split = torch.tensor([0, 0, 0, 0, 1, 2], dtype=torch.uint8).repeat(count // 6)
    data.write(0, networks, {"label": torch.arange(count) % 10, "image": image, "split": split})
    return folder


def train(*options):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args([str(x) for x in options])
    return command.train(arguments, World())


def run(source, settings=TINY, seed=0, folder=None, system="MAGEP", augment=0):
    return Run(generalization("relu", augment), system, source, settings, seed, World(), folder)


def test_kendall_tau_counts_pairs():
    torch.manual_seed(0)
    for x, y in ((torch.randn(30), torch.randn(30)), (torch.randint(0, 5, (30,)), torch.randint(0, 4, (30,)))):
        agree = untied_x = untied_y = 0
        for i, j in itertools.combinations(range(30), 2):
            a, b = (x[i] - x[j]).sign().item(), (y[i] - y[j]).sign().item()
            agree, untied_x, untied_y = agree + a * b, untied_x + (a != 0), untied_y + (b != 0)
        assert kendall_tau(x.float(), y.float()) == pytest.approx(agree / math.sqrt(untied_x * untied_y))
    x = torch.arange(3000.0)
    assert (
        kendall_tau(x, x.exp2().nan_to_num(posinf=1.0).neg()) < 1
        and kendall_tau(x, -x) == -1
        and kendall_tau(x, 3 * x) == 1
    )
    assert kendall_tau(x, torch.full_like(x, torch.nan)) == kendall_tau(x, torch.ones_like(x)) == 0


def test_augmentation_adds_a_moved_copy_of_each_network(tmp_path):
    networks = Source(write_zoo(tmp_path)).read("train")
    both = add_copies(networks, torch.Generator().manual_seed(0), exponent=3)
    n = len(networks)
    assert len(both) == 2 * n and torch.equal(both.columns["accuracy"][:n], both.columns["accuracy"][n:])
    assert_same(both[:n].features, networks.features, 0)
    assert both[n:].features.weights[0].abs().mean() > 50 * networks.features.weights[0].abs().mean()
    model = CnnGeneralization(unit_paths=True).build(CNN)
    torch.testing.assert_close(model(both[n:].features), model(networks.features), rtol=1e-3, atol=1e-5)


def test_division_by_the_scale_of_paths_respects_the_symmetry_and_bounds_the_range():
    features = make_networks(CNN, 5)
    divide = UnitPaths(CNN)
    divided, norms = divide(features.to(torch.float64))
    log_scale = norms[:, :1]
    for kind in ("positive", "sign"):
        g = GroupElement.sample(CNN, kind, batch_size=5)
        moved, moved_norms = divide(g @ features.to(torch.float64))
        assert_same(moved, g @ divided, 1e-12)
        torch.testing.assert_close(moved_norms, norms)
    assert log_scale.abs().max() < 1
    large, large_norms = divide(features.map(lambda x: 1000 * x))
    torch.testing.assert_close(
        large_norms[:, :1] - log_scale.float(), torch.full((5, 1), math.log(1000)), atol=0.2, rtol=0
    )
    assert large.weights[1].abs().max() < 10


def test_path_sums_are_sums_over_paths():
    features = make_networks(WeightSpace((2, 3, 2), (4, 1)), 1).to(torch.float64)
    (first, last), (b1, b2) = ([x[0].abs() for x in xs] for xs in (features.weights, features.biases))
    for power in (1, 2):
        paths = [
            [
                first[t, k, j] * last[0, i, k]
                for t, k, j, i in itertools.product(range(4), range(3), range(2), range(2))
            ],
            [b1[0, k] * last[0, i, k] for k, i in itertools.product(range(3), range(2))],
            list(b2[0]),
        ]
        wanted = torch.stack([sum(x**power for x in of_start) for of_start in paths])
        torch.testing.assert_close(path_sums(features, power)[0], wanted)


def test_a_run_learns_and_says_so(tmp_path):
    source = Source(write_zoo(tmp_path / "data"))
    longer = replace(TINY, steps=150, evaluate_every=50, learning_rate=1e-2)
    with Progress(disable=True) as progress:
        result = run(source, longer, folder=tmp_path / "run").train(progress)
    assert result["test"] > 0.5 and result["steps"] == 150
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [int(line["step"]) for line in table] == [line["step"] for line in lines] == [50, 100, 150]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["test"] == result["test"]


def test_a_killed_run_goes_on_to_the_same_result(tmp_path, monkeypatch):
    source = Source(write_zoo(tmp_path / "data"))
    noisy = replace(TINY, weight_noise=0.1, weight_decay=0.1)
    with Progress(disable=True) as progress:
        whole = run(source, noisy, folder=tmp_path / "whole")
        expected = whole.train(progress)
        step = Run.step

        def killed(self):
            if self.state.step == 7:
                raise KeyboardInterrupt
            return step(self)

        monkeypatch.setattr(Run, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            run(source, noisy, folder=tmp_path / "run").train(progress)
        monkeypatch.setattr(Run, "step", step)
        again = run(source, noisy, folder=tmp_path / "run")
        assert again.state.step == 4
        found = again.train(progress)
    assert found | {"seconds": 0} == expected | {"seconds": 0}
    for name, x in whole.model.state_dict().items():
        assert torch.equal(x, again.model.state_dict()[name]), name
    with pytest.raises(ValueError, match="is of another run \\(other learning_rate\\)"):
        run(source, replace(noisy, learning_rate=2e-3), folder=tmp_path / "run")


def test_noise_and_decay_change_training_and_not_evaluation(tmp_path):
    source = Source(write_zoo(tmp_path))
    plain, noisy = (run(source, replace(TINY, weight_noise=noise)) for noise in (0.0, 0.5))
    assert plain.evaluate("val") == noisy.evaluate("val") == noisy.evaluate("val")
    assert not torch.equal(plain.step(), noisy.step())
    decayed = run(source, replace(TINY, weight_decay=500.0, learning_rate=1e-3))
    before = sum(p.norm() for p in decayed.model.parameters())
    decayed.step()
    assert sum(p.norm() for p in decayed.model.parameters()) < 0.6 * before


def test_seeds_differ_and_are_the_same_again(tmp_path):
    source = Source(write_zoo(tmp_path))
    losses = [torch.stack([r.step() for _ in range(3)]) for r in (run(source, seed=k) for k in (0, 0, 1))]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])


def test_an_epoch_has_every_network_once(tmp_path):
    source = Source(write_zoo(tmp_path))
    lanes = run(source).lanes
    seen = torch.cat([lanes.batch(step)[1] for step in range(lanes.batches_per_epoch)]).flatten()
    everything = source.read("train").columns["accuracy"]
    assert seen.sort().values.tolist() == everything.sort().values.tolist()
    assert not torch.equal(lanes.batch(0)[1], lanes.batch(lanes.batches_per_epoch)[1])


def test_a_gradient_is_no_longer_than_the_clip(tmp_path):
    source = Source(write_zoo(tmp_path))

    def norm(clip):
        one = run(source, replace(TINY, clip=clip))
        one.step()
        return float(torch.nn.utils.get_total_norm([p.grad for p in one.model.parameters() if p.grad is not None]))

    free = norm(None)
    assert norm(2 * free) == pytest.approx(free) and norm(free / 2) == pytest.approx(free / 2, rel=1e-3)


def test_patience_ends_a_run(tmp_path):
    source = Source(write_zoo(tmp_path))
    stuck = replace(TINY, steps=100, learning_rate=0.0, evaluate_every=2, patience=2)
    with Progress(disable=True) as progress:
        assert run(source, stuck).train(progress)["steps"] == 6


@pytest.mark.parametrize("precision", ["bfloat16"])
def test_mixed_precision_trains(tmp_path, precision):
    source = Source(write_zoo(tmp_path))
    exact, mixed = (run(source, replace(TINY, precision=p)) for p in ("float32", precision))
    a, b = (torch.stack([r.step() for _ in range(3)]) for r in (exact, mixed))
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


def test_a_batch_that_cannot_be_shared_and_a_data_set_that_is_too_small_are_said(tmp_path):
    source = Source(write_zoo(tmp_path))
    with pytest.raises(ValueError, match="can be shared by 2 processes or a divisor of that; found 4"):
        Run(generalization("relu"), "MAGEP", source, replace(TINY, batch_size=6), 0, World(size=4), None)
    with pytest.raises(DataError, match="fewer than one batch"):
        run(source, replace(TINY, batch_size=256))


SCRIPT = """
import sys, torch
from dataclasses import replace
from pathlib import Path
from benchmarks.data import Source, networks
from benchmarks.tasks.loop import World
from rich.progress import Progress
from tests import test_tasks as t
torch.set_num_threads(1)
world = World.join("cpu")
read = []
original = networks.ShardedNetworks.read
networks.ShardedNetworks.read = lambda self, k: read.append(k) or original(self, k)
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
one = t.Run(t.generalization("relu", 2), "MAGEP", Source(folder), t.TINY, 0, world, out / "run")
torch.save(sorted(set(read)), out / f"read{world.rank}")
losses = [world.mean(one.step()) for _ in range(6)]
if world.rank == 0:
    torch.save((torch.stack(losses), one.evaluate("val")), out / "losses")
else:
    one.evaluate("val")
with Progress(disable=True) as progress:
    one.train(progress)
world.wait()
World.leave()
"""


def test_two_processes_have_the_losses_of_one(tmp_path):
    folder = write_zoo(tmp_path / "data", shards=4)
    root = Path(__file__).parent.parent
    environment = {k: v for k, v in os.environ.items() if k != "RANK"} | {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
    }
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = {}
    for count in (1, 2):
        out = tmp_path / str(count)
        out.mkdir()
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
        call = [sys.executable, *launcher, str(script), str(folder), str(out)]
        done = subprocess.run(call, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        found[count] = torch.load(out / "losses")
    torch.testing.assert_close(found[1][0], found[2][0], rtol=1e-5, atol=1e-6)
    # A network and its moved copy get the same output up to rounding, so τ may differ by the order of such pairs.
    assert found[1][1] == pytest.approx(found[2][1], abs=0.02)
    read = [torch.load(tmp_path / "2" / f"read{rank}") for rank in (0, 1)]
    assert read == [[0, 1], [2, 3]]
    results = [json.loads((tmp_path / str(count) / "run" / "result.json").read_text()) for count in (1, 2)]
    assert results[0]["test"] == pytest.approx(results[1]["test"], abs=0.02)


def config_file(tmp_path, models):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY_CONFIG | {"models": models}))
    return path


def test_generalization_end_to_end(tmp_path, capsys):
    config = config_file(tmp_path, {"MAGEP": {"channels": 2, "hidden": 4, "unit_paths": True}})
    names = ["MAGEP", "STATNN", "MAGEP: Only Inter-Layer terms"]
    for activation, augment in (("relu", 4), ("tanh", 0)):
        folder = write_zoo(tmp_path / activation, activation)
        options = ["--data", folder, "--config", config, "--out", tmp_path / "out", "--augment", augment]
        rows = train("generalization", *options, "--model", *names, "--seeds", 0, 1)
        assert [(r["model"], r["seed"]) for r in rows] == [(name, seed) for name in names for seed in (0, 1)]
        assert all(-1 <= r["test"] <= 1 for r in rows)
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 12
    assert "0.932 ± 0.001" in capsys.readouterr().out
    with pytest.raises(ValueError, match="generalization has no model ResNet"):
        train("generalization", "--data", tmp_path / "relu", "--model", "ResNet")


def test_every_row_of_the_ablation_can_be_trained():
    systems = generalization("relu").systems
    for name in ABLATION:
        model = systems[f"MAGEP: {name}"](CNN, {"channels": 2, "hidden": 4, "unit_paths": True})
        loss = model(make_networks(CNN, 3)).sum()
        loss.backward()
        assert loss.isfinite()


INR_MODELS = {
    "MLP": {"hidden": 8},
    "NP": {"channels": 4, "fourier": 4, "hidden": 8},
    "HNP": {"channels": 4, "fourier": 4, "hidden": 8},
    "Monomial-NFN": {"channels": 4, "np_channels": 4, "fourier": 4, "hidden": 8},
    "MAGEP": {"channels": 4, "layers": 1, "hidden": 8},
    "MAGEP-NP": {"channels": 4, "np_channels": 4, "fourier": 4, "hidden": 8},
}


def test_inr_classify_end_to_end(tmp_path, capsys):
    folder = write_sirens(tmp_path / "mnist")
    config = config_file(tmp_path, INR_MODELS)
    rows = train("inr-classify", "--data", folder, "--config", config, "--out", tmp_path / "out", "--model", "all")
    assert [r["model"] for r in rows] == list(INR_MODELS) and all(0 <= r["test"] <= 100 for r in rows)
    assert "77.55 ± 0.68" in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds sin networks; generalization is about relu and tanh"):
        train("generalization", "--data", folder)


@pytest.mark.parametrize("colours", [1, 3])
def test_inr_edit_end_to_end(tmp_path, capsys, colours):
    folder = write_sirens(tmp_path / "data", colours)
    small = {"np_channels": 4, "fourier": 4}
    models = {name: small for name in ("NP", "HNP", "Monomial-NFN", "MAGEP")} | {"MLP": {"hidden": 8}}
    config = config_file(tmp_path, models)
    rows = train("inr-edit", "--data", folder, "--config", config, "--out", tmp_path / "out", "--model", "all")
    assert {r["model"] for r in rows} == set(models) and all(0 < r["test"] < 10 for r in rows)
    change = "dilate" if colours == 1 else "contrast"
    pictures = list((tmp_path / "out").glob(f"inr-edit-{change}/data/*/seed0/edited.png"))
    assert len(pictures) == 5 and all(path.stat().st_size > 1000 for path in pictures)
    assert f"unedited: MSE {unedited(Source(folder).read('test'), change):.5f}" in capsys.readouterr().out


def test_edited_images_are_what_they_should_be():
    image = torch.zeros(1, 5, 5, 1)
    image[0, 2, 2] = 1
    assert edited(image, "dilate").squeeze().tolist() == [
        [float(1 <= y <= 3 and 1 <= x <= 3) for x in range(5)] for y in range(5)
    ]
    grey = torch.tensor([0.4, 0.5, 0.6, 0.9, 0.1]).view(1, 1, 5, 1)
    torch.testing.assert_close(edited(grey, "contrast").flatten(), torch.tensor([0.35, 0.5, 0.65, 1.0, 0.0]))


def test_configs_are_checked(tmp_path):
    assert settings(CONFIGS["inr-edit"]["small"], "NP", steps=3).steps == 3
    assert settings(read_config("generalization", "small"), "MAGEP: Only Inter-Layer terms").model["unit_paths"]
    of_one = TINY_CONFIG | {"training": {"NP": {"weight_decay": 0.5}}}
    assert [settings(of_one, name).weight_decay for name in ("NP", "HNP")] == [0.5, 0.0]
    with pytest.raises(FileNotFoundError, match="no config 'huge' of inr-edit: expected one of paper, small"):
        read_config("inr-edit", "huge")
    path = tmp_path / "config.json"
    path.write_text('{"steps": 3, "epochs": 4}')
    with pytest.raises(ValueError, match=r"unknown keys \['epochs'\], lacks"):
        read_config("inr-edit", str(path))


def test_the_paper_s_figures_fit_the_systems():
    for (activation, _), figures in paper.GENERALIZATION.items():
        assert set(figures) <= set(generalization(activation).systems)
    assert [paper.image_set(x) for x in ("FashionMNIST", "mnist.npz", "cifar10_20k", "x")] == [
        "fashion",
        "mnist",
        "cifar10",
        "",
    ]
    assert "accuracy" in ZOO_COLUMNS


def test_accuracy_runs_what_is_missing_and_reports_it(tmp_path, monkeypatch):
    zoo, sirens = write_zoo(tmp_path / "zoo"), write_sirens(tmp_path / "inr")
    parts = (
        accuracy.Part("generalization", "relu", ("MAGEP", "STATNN"), 2),
        accuracy.Part("generalization", "relu", ("MAGEP",), 1, augment=4),
        accuracy.Part("generalization", "relu", ("ablation",), 1),
        accuracy.Part("inr-classify", "inr", ("MLP",), 1),
        accuracy.Part("inr-edit", "inr", ("MLP",), 1, change="dilate"),
        accuracy.Part("inr-edit", "inr-cifar10", ("MLP",), 1, change="contrast"),
    )
    monkeypatch.setattr(accuracy, "PARTS", parts)
    monkeypatch.setattr(accuracy, "QUICK_STEPS", 4)
    small = {"MAGEP": {"channels": 2, "hidden": 4}, "MLP": {"hidden": 4}}
    monkeypatch.setattr(accuracy, "read_config", lambda task, name: TINY_CONFIG | {"models": small})

    def call(*options):
        parser = argparse.ArgumentParser()
        accuracy.add_arguments(parser)
        where = ["--relu", zoo, "--inr", sirens, "--out", tmp_path / "out", "--work", tmp_path / "work", "--quick"]
        arguments = parser.parse_args([str(x) for x in (*where, *options)])
        arguments.run(arguments)
        return accuracy.read_rows(tmp_path / "out")

    rows = call("--parts", "inr-classify")
    assert [r["model"] for r in rows] == ["MLP"]
    rows = call("--models", "MAGEP", "STATNN")
    assert {(r["model"], r["seed"]) for r in rows[1:]} == {("MAGEP", "0"), ("STATNN", "0")}
    rows = call("--seeds", "2")
    assert len(rows) == 5 + len(ABLATION) + 2 and call() == rows
    rows = call("--inr-cifar10", write_sirens(tmp_path / "colours", colours=3))
    assert [(r["subset"], r["task"]) for r in rows[5 + len(ABLATION) + 2 :]] == [("inr-cifar10", "inr-edit")]
    text = (tmp_path / "out" / "accuracy.md").read_text()
    for words in ("Kendall's τ", "U[1, 10^4]", "Only Inter-Layer terms", "unedited", "0.933 ± 0.001", "Every run"):
        assert words in text
    assert (tmp_path / "out" / "augmentation-relu.png").stat().st_size > 5000
