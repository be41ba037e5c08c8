"""What README and docs show is true: their code runs, their commands exist, every option has its word of help."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from benchmarks.__main__ import build_parser
from benchmarks.tasks.configs import read_config, settings
from examples import accelerate_model
from magep_fast import MagepEquivariant, MagepInvariant, WeightSpace, from_modules

ROOT = Path(__file__).parent.parent
PAGES = {page: (ROOT / page).read_text() for page in ("README.md", "CONTRIBUTING.md")} | {
    f"docs/{path.name}": path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))
}


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def indented(page):
    """The first block of a page that is set apart by its indentation."""
    return textwrap.dedent(re.search(r"(?:^    .*\n)+", PAGES[page], re.MULTILINE)[0]).strip()


def networks(*widths):
    """ReLU networks of one hidden layer each."""
    return [nn.Sequential(nn.Linear(2, n), nn.ReLU(), nn.Linear(n, 3)) for n in widths]


def names_of_drop_in():
    model = accelerate_model.build()
    torch.save(model.state_dict(), "theirs.pt")
    return {"model": model, "torch": torch}


def names_of_ragged():
    space, features = WeightSpace((2, None, 3)), [from_modules(network) for network in networks(4, 7, 5)]
    model = MagepInvariant(space, 1, 5)
    return {
        "networks": networks(4, 7, 5),
        "layer": MagepEquivariant(space, 1, 1),
        "device": "cpu",
        "list_of_features": features,
        "models": {space: model},
        "model": model,
        "results": torch.full((3, 5), torch.nan),
        "targets": torch.randn(3, 5),
        "criterion": nn.MSELoss(),
    }


def names_of_convert():
    shapes = {"0": (5, 2), "2": (4, 5), "4": (3, 4)}
    state = {f"{k}.weight": torch.randn(shape) for k, shape in shapes.items()}
    state |= {f"{k}.bias": torch.randn(shape[0]) for k, shape in shapes.items()}
    state["encoder/kernel"], state["encoder/offset"] = state.pop("0.weight"), state.pop("0.bias")
    return {"checkpoint": state | {"step": torch.tensor(7)}}


NAMES_BEFORE = {
    "docs/drop_in.md": names_of_drop_in,
    "docs/ragged.md": names_of_ragged,
    "docs/convert.md": names_of_convert,
}
"""What the reader of a page has already; where nothing is said, nothing."""

TRUE_AFTER = {
    "README.md": lambda names: names["accuracy"].shape == (8, 1),
    "docs/index.md": lambda names: names["answers"].shape == (16, 10) and names["report"].model is names["model"],
    "docs/drop_in.md": lambda names: (
        Path("for_them.pt").exists() and indented("docs/drop_in.md") == str(names["report"])
    ),
    "docs/ragged.md": lambda names: (
        len(names["networks"]) == 3 and names["results"].isfinite().all() and names["loss"].requires_grad
    ),
    "docs/architecture.md": lambda names: (
        names["edited"][0].keys() == names["state_dicts"][0].keys() and names["layer"].psi.grad is not None
    ),
    "docs/backends.md": lambda names: names["losses"].shape == (25,) and names["losses"].isfinite().all(),
    "docs/convert.md": lambda names: str(names["features"].space) == str(WeightSpace((2, 5, 4, 3))),
}


def test_code_on_every_page_is_known():
    assert {page for page in PAGES if blocks(page)} == set(TRUE_AFTER)


@pytest.mark.parametrize("page", TRUE_AFTER)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = NAMES_BEFORE.get(page, dict)()
    for block in blocks(page):
        exec(block, names)
    assert TRUE_AFTER[page](names)


def test_functions_are_in_the_files_said_to_have_them():
    rows = re.findall(r"^\| \d? *\| `(\S+)` \| (.*) \|$", PAGES["docs/architecture.md"], re.MULTILINE)
    assert len(rows) > 20
    for file, names in rows:
        text = (ROOT / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b{name}\b", text), f"{file} has no {name}"


def test_the_config_shown_is_one(tmp_path):
    (text,) = blocks("docs/tasks.md", "json")
    path = tmp_path / "config.json"
    path.write_text(text)
    config = read_config("generalization", str(path))
    assert settings(config, "MAGEP").model == json.loads(text)["models"]["MAGEP"]


def commands():
    """Every command line with `python -m` and every `make` in backquotes or blocks of README and docs."""
    found = set()
    for text in PAGES.values():
        code = re.findall(r"```\n(.*?)```", text, re.DOTALL) + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
        lines = [line.partition("#")[0].strip() for part in code for line in part.splitlines()]
        found |= {re.sub(r"^torchrun .*?-m", "python -m", line) for line in lines}
    return sorted(line for line in found if re.match(r"python -m (benchmarks|examples|magep_fast)\b|make [a-z]", line))


def test_commands_are_found():
    assert len(commands()) > 25


@pytest.mark.parametrize("command", commands())
def test_commands_exist(command):
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[2] == "benchmarks":
        if words[3:] not in ([], ["data"], ["train"]):  # those name a command that has further ones
            build_parser().parse_args(words[3:])
    else:
        module = words[2].replace("NAME", "own_architecture").replace(".", "/")
        assert (ROOT / f"{module}.py").exists()


def parsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


@pytest.mark.parametrize("parser", list(parsers(build_parser())), ids=lambda parser: parser.prog[10:])
def test_help_explains_every_option(parser):
    assert parser.description and parser.format_help()
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            assert action.help, f"{parser.prog} {action.option_strings} has no help"


@pytest.mark.parametrize(
    "module", ["benchmarks", "magep_fast.info", "examples.edit_siren", "examples.predict_accuracy"]
)
def test_help_from_the_shell(module):
    command = [sys.executable, "-m", module, "--help"]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | {"COLUMNS": "80"}
    )
    assert run.returncode == 0 and run.stdout.startswith("usage: "), run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train", "inr-edit", "--data", "nowhere"], "error: nowhere does not exist; expected a data set"),
        (["data", "zoo", "--out", "zoo", "--images", "nowhere"], "error: nowhere holds no images"),
        (["data", "zoo", "--out", "zoo", "--images", "nowhere.npz"], "error: "),
        (["data", "inr", "--out", "inr", "--images", "empty.npz"], "error: empty.npz has no x_test"),
        (["layers", "--device", "cuda:99"], "error: --device cuda:99 cannot be used here: "),
        (["accuracy", "--report-only", "--out", "nowhere"], "error: nowhere/runs.csv has no runs to report"),
    ],
)
def test_mistakes_of_the_user_are_told_without_a_traceback(options, message, tmp_path):
    numpy.savez(tmp_path / "empty.npz")
    command = [sys.executable, "-m", "benchmarks", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert run.returncode == 2 and run.stderr.startswith(message) and run.stderr.count("\n") == 1, run.stderr
