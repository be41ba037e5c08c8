import csv
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import tables, training
from benchmarks.process_peak import peak_bytes
from benchmarks.tables import COMPILED, FUSED, REFERENCE, WORKS, Entry, Work
from benchmarks.tables_report import COLUMNS, cells, duration
from magep_fast import TrainingStep, WeightSpace
from magep_fast.models import CnnGeneralization, mlp
from magep_fast.ops.backends import choose_backend

SPACE = WeightSpace((1, 4, 3), (9, 1))
MEASURED = ["repeats", "p20_ms", "p50_ms", "p80_ms", "run_s", "speed_up", "peak_mb", "process_mb"]
PAPER = ["paper_parameters", "paper_a100_run_s", "paper_a100_mb"]
ENVIRONMENT = ["time", "cpu", "threads", "python", "torch", "magep_fast"]
CSV_COLUMNS = [
    *["run", "mode", "table", "model", "backend", "status", *MEASURED, "parameters", "ops", "error"],
    *[*PAPER, "inputs", "batch", "steps", "device", *ENVIRONMENT],
]


class Rival(nn.Module):
    """A small network that counts its forward passes and may raise at one of them."""

    calls = 0

    def __init__(self, space, raises=None, at=0):
        super().__init__()
        self.net = nn.Sequential(mlp(3, 4, 1), nn.Sigmoid())
        self.raises, self.at, self.count = raises, at, 0

    def forward(self, features):
        self.count += 1
        Rival.calls += 1
        if self.raises is not None and self.count == self.at:
            raise self.raises
        return self.net(features.biases[-1].flatten(1))


class Diverging(Rival):
    def forward(self, features):
        return super().forward(features) * (torch.nan if self.count > 2 else 1)


class TinyWork(Work):
    extra = ()

    def entries(self):
        literal = CnnGeneralization(channels=2, hidden=4, backend="reference").build
        fused = CnnGeneralization(channels=2, hidden=4).build
        return [
            *self.extra,
            Entry("rival", Rival),
            Entry(REFERENCE, literal, backend="reference"),
            Entry(FUSED, fused, backend="auto"),
        ]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """One table of small networks, and no processes started to measure memory."""
    work = TinyWork("Tiny: table", SPACE, CnnGeneralization(), 20, 8, 6, nn.functional.binary_cross_entropy, "relu")
    monkeypatch.setattr(tables, "WORKS", {"tiny": work})
    monkeypatch.setattr(tables, "process_peak", lambda *_: 123.0)
    monkeypatch.setattr(tables.Subject, "take_turn", lambda self: self.seconds.append(self.seconds_per_step(1)))
    monkeypatch.setattr(Rival, "calls", 0)
    return work


def run(out, *options):
    import argparse

    parser = argparse.ArgumentParser()
    tables.add_arguments(parser)
    arguments = parser.parse_args(["--repeats", "2", "--out", str(out), *options])
    arguments.run(arguments)
    with (out / "tables.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def with_extra(monkeypatch, *entries):
    monkeypatch.setattr(TinyWork, "extra", entries)


def test_the_tables_have_every_system_and_magep_three_times():
    for subset in ("relu", "tanh"):
        names = [entry.name for entry in WORKS[subset].entries()]
        rivals = ["MLP", "STATNN", "NP", "HNP", "GNN", "GNN-32", "ScaleGMN", "Monomial-NFN"]
        assert names == [*rivals, REFERENCE, COMPILED, FUSED]
    for siren in ("mnist", "cifar10"):
        assert [entry.name for entry in WORKS[siren].entries()] == [REFERENCE, FUSED]


def test_the_work_is_the_paper_s():
    assert (WORKS["relu"].networks, WORKS["relu"].batch_size, WORKS["relu"].steps) == (6050, 8, 757 * 50)
    assert (WORKS["tanh"].networks, WORKS["tanh"].batch_size, WORKS["tanh"].steps) == (5949, 8, 744 * 50)


def test_quick_run_writes_csv_markdown_and_plots(tmp_path):
    rows = run(tmp_path)
    assert list(rows[0]) == CSV_COLUMNS
    assert [row["model"] for row in rows] == ["rival", REFERENCE, FUSED]
    chosen = choose_backend("auto", torch.device("cpu"), torch.float32).name
    assert [row["backend"] for row in rows] == ["", "reference", chosen]
    for row in rows:
        assert row["status"] == "ok" and row["mode"] == "quick" and row["inputs"] == "made here"
        assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert float(row["run_s"]) == pytest.approx(6 * float(row["p50_ms"]) / 1e3, abs=1e-4)
        assert float(row["peak_mb"]) > 0 and float(row["process_mb"]) == 123 and int(row["ops"]) > 0
        assert float(row["speed_up"]) > 0
    assert float(rows[1]["speed_up"]) == 1 and float(rows[2]["error"]) < 1e-4
    text = (tmp_path / "tables.md").read_text()
    assert f"| {' | '.join(COLUMNS)} |" in text and "| rival |" in text and "networks: made here" in text
    for name in ("runtime.png", "memory.png", "scatter.png"):
        assert (tmp_path / name).stat().st_size > 5_000


def test_the_paper_s_figures_stand_beside_ours():
    class Stub(tables.Run):
        def __init__(self):
            self.id, self.mode, self.device, self.zoo = "now", "quick", torch.device("cpu"), None

    entry = next(entry for entry in WORKS["relu"].entries() if entry.name == "HNP")
    row = Stub().row(
        "tiny", entry, "ok", {"p50_ms": 1.0, "p20_ms": 1.0, "p80_ms": 1.0, "run_s": 60, "parameters": 2_811_743}
    )
    shown = dict(zip(COLUMNS, cells(row), strict=True))
    assert shown["params"] == shown["paper's params"] == "2.81M"
    assert (shown["paper's run, A100"], shown["paper's MB, A100"]) == ("30m06s", "856")
    assert shown["whole run"] == "1m00s"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Entry("bad", lambda space: 1 / 0), "failed: ZeroDivisionError: division by zero"),
        (Entry("bad", partial(Rival, raises=RuntimeError("at the start"), at=1)), "failed: RuntimeError: at the start"),
        (Entry("bad", partial(Rival, raises=RuntimeError("later"), at=4)), "failed: RuntimeError: later"),
        (Entry("bad", partial(Rival, raises=RuntimeError("at last"), at=5)), "failed: RuntimeError: at last"),
    ],
)
def test_a_model_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, entry, message):
    with_extra(monkeypatch, entry)
    rows = {row["model"]: row for row in run(tmp_path)}
    assert rows["bad"]["status"] == message and rows["bad"]["p50_ms"] == ""
    assert [rows[name]["status"] for name in ("rival", REFERENCE, FUSED)] == ["ok"] * 3
    assert message in (tmp_path / "tables.md").read_text()


@pytest.mark.parametrize("mode", ["--quick", "--full"])
def test_a_model_that_does_not_train_has_no_time(tmp_path, monkeypatch, tiny, mode):
    with_extra(monkeypatch, Entry("bad", Diverging))
    monkeypatch.setattr(tables, "WORKS", {"tiny": replace(tiny, loss=nn.functional.mse_loss)})
    rows = {row["model"]: row for row in run(tmp_path, mode, "--tables", "tiny")}
    assert rows["bad"]["status"].startswith("failed: ArithmeticError: the loss is nan after")
    assert rows["bad"]["p50_ms"] == "" and rows["rival"]["status"] == "ok"


def test_a_model_that_kills_its_process_is_not_run_in_this_one(tmp_path, monkeypatch):
    def measure(table, model, *_):
        if model == "rival":
            raise RuntimeError("a process of its own ended with code -9: no message")
        return 1.0

    monkeypatch.setattr(tables, "process_peak", measure)
    rows = {row["model"]: row for row in run(tmp_path)}
    assert "ended with code -9" in rows["rival"]["status"] and Rival.calls == 0
    assert rows[FUSED]["status"] == "ok"


def test_no_speed_up_for_a_wrong_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "disagreement", lambda found, expected: 0.5)
    rows = {row["model"]: row for row in run(tmp_path)}
    assert rows[FUSED]["speed_up"] == "wrong by 5e-01"
    assert float(rows["rival"]["speed_up"]) > 0


@pytest.mark.parametrize("mode", ["--quick", "--full"])
def test_no_speed_up_for_wrong_steps(tmp_path, monkeypatch, mode):
    """Outputs and gradients are right, what training makes of them is not."""

    class Halved(TrainingStep):
        def train(self, *arguments):
            before = [p.detach().clone() for p in self.model.parameters()]
            losses = super().train(*arguments)
            if self.model[0].backend != "reference":
                with torch.no_grad():
                    for p, q in zip(self.model.parameters(), before, strict=True):
                        p.lerp_(q, 0.5)
            return losses

    assert float(rows_of(tmp_path / "right", mode)[FUSED]["speed_up"]) > 0
    monkeypatch.setattr(training, "TrainingStep", Halved)
    assert rows_of(tmp_path / "wrong", mode)[FUSED]["speed_up"].startswith("wrong by ")


def rows_of(out, mode):
    return {row["model"]: row for row in run(out, mode, "--tables", "tiny")}


@pytest.mark.parametrize("mode", ["--quick", "--full"])
def test_a_form_of_magep_that_fails_at_a_step(tmp_path, monkeypatch, mode):
    def losses(self, steps):
        if self.entry.name == FUSED:
            self.trainer.training_step.loss = None
        return list(self.trainer.run(steps))

    monkeypatch.setattr(tables.Subject, "losses", losses)
    rows = rows_of(tmp_path, mode)
    assert rows[FUSED]["status"].startswith("failed: TypeError") and rows[FUSED]["speed_up"] == ""
    assert rows[REFERENCE]["status"] == rows["rival"]["status"] == "ok"


def test_no_speed_up_for_nan(monkeypatch):
    assert tables.speed_up(FUSED, 1.0, 0.1, float("nan")) == "wrong by nan"
    assert tables.speed_up(FUSED, 1.0, 0.1, None) == "not compared"
    assert tables.speed_up("NP", None, 0.1, None) == ""


def test_an_interrupted_quick_run_keeps_its_rows_and_resumes(tmp_path, monkeypatch):
    first = run(tmp_path, "--models", REFERENCE, FUSED)
    with_extra(monkeypatch, Entry("interrupts", partial(Rival, raises=KeyboardInterrupt(), at=4)))
    run(tmp_path, "--resume", "--repeats", "4")
    rows = [row for row in run_rows(tmp_path) if row not in first]
    status = {row["model"]: row["status"] for row in rows}
    assert status == {"interrupts": "interrupted after 1 of 4 rounds", "rival": "interrupted after 1 of 4 rounds"}
    with_extra(monkeypatch, Entry("interrupts", Rival))
    run(tmp_path, "--resume")
    rows = run_rows(tmp_path)
    assert len({row["run"] for row in rows}) == 1
    finished = [row["model"] for row in rows if row["status"] == "ok"]
    assert sorted(finished) == sorted(["interrupts", "rival", REFERENCE, FUSED])
    calls = Rival.calls
    run(tmp_path, "--resume")
    assert Rival.calls == calls and run_rows(tmp_path) == rows


def run_rows(out):
    with (out / "tables.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_without_resume_measures_everything_anew(tmp_path):
    run(tmp_path)
    rows = run(tmp_path, "--models", "rival")
    assert [row["model"] for row in rows] == ["rival", REFERENCE, FUSED, "rival"]


def test_full_run_trains_every_step_and_resumes(tmp_path, monkeypatch):
    with_extra(monkeypatch, Entry("interrupts", partial(Rival, raises=KeyboardInterrupt(), at=3)))
    rows = run(tmp_path, "--full", "--tables", "tiny")
    assert [row["model"] for row in rows] == [REFERENCE]
    assert rows[0]["repeats"] == "1" and rows[0]["steps"] == "6" and rows[0]["mode"] == "full"
    with_extra(monkeypatch)
    rows = run(tmp_path, "--full", "--tables", "tiny", "--resume")
    assert [row["model"] for row in rows] == [REFERENCE, "rival", FUSED]
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["speed_up"]) == pytest.approx(float(rows[0]["run_s"]) / float(row["run_s"]), rel=0.05)


def test_unknown_models_are_named(tmp_path):
    with pytest.raises(SystemExit, match="no model NPP in the tables tiny; there are rival, MAGEP-reference"):
        run(tmp_path, "--models", "NPP")


def test_a_turn_is_one_slow_step_or_several_fast_ones(monkeypatch):
    monkeypatch.undo()
    subject = object.__new__(tables.Subject)
    for step, timed in ((1.0, [1]), (0.03, [1, 3]), (1e-4, [1, 10])):
        subject.seconds, taken = [], []
        subject.seconds_per_step = lambda steps, step=step, taken=taken: taken.append(steps) or step
        subject.take_turn(lasting=0.1)
        assert subject.seconds == [step] and taken == timed


def test_the_compiled_form_runs(tmp_path, monkeypatch):
    class Plain(nn.Module):
        def __init__(self, space):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())

        def forward(self, features):
            return self.net(features.biases[-1].flatten(1))

    with_extra(monkeypatch, Entry("plain", Plain, compiled=True), Entry("slow", Plain, slow_to_build=True))
    (row,) = run(tmp_path, "--models", "plain")
    assert row["status"] == "ok" and row["ops"] == "" and float(row["p50_ms"]) > 0
    assert "slow" not in [row["model"] for row in run(tmp_path)]
    assert "slow" in [row["model"] for row in run(tmp_path, "--models", "slow")]


def test_a_csv_of_another_kind_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "tables.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="Move it away or give another folder"):
        run(tmp_path)
    assert Rival.calls == 0


def test_durations():
    assert [duration(x) for x in (None, 2.04, 119.6, 16049)] == ["–", "2.0s", "2m00s", "4h27m"]


def test_process_peak_is_that_of_a_real_process(monkeypatch):
    monkeypatch.undo()
    ballast = torch.ones(200 << 20)  # 839 MB, which are not the other process's
    assert 100 < tables.process_peak("relu", "MLP", "cpu", 1) < 800
    assert peak_bytes() > ballast.nbytes
    with pytest.raises(RuntimeError, match="ended with code 1: StopIteration"):
        tables.process_peak("relu", "no such model", "cpu", 1)
