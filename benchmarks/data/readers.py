"""Readers of the data sets that researchers have: the Small CNN Zoo, folders of SIRENs, objects of nfn."""

from __future__ import annotations

import csv
import gzip
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy
import torch
from rich.progress import track
from torch import Tensor

from benchmarks.data.networks import DataError, Networks
from magep_fast.convert import from_nfn, from_state_dicts, from_zoo_rows
from magep_fast.spaces import WeightFeatures

FINAL_STEP = 86
ZOO_FILES = ("weights.npy", "layout.csv", "metrics.csv.gz")
CLASS_FOLDER = re.compile(r"_(\d+)s$")
SIREN_FILE = re.compile(r"net(\d+)\.pth$")


def read_cnn_zoo(folder: Path, activation: str | None = None, step: int = FINAL_STEP) -> Networks:
    """The networks of a data set of the Small CNN Zoo (Unterthiner et al. 2020) at one step of their training.

    The folder holds weights.npy, layout.csv and metrics.csv.gz as published. In the order of the files the second half
    of the networks at this step is for testing, as its authors have it, and the last tenth of the first for validation.

    Args:
        activation: which networks; None if the folder has only one kind.
    """
    missing = [name for name in ZOO_FILES if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}; expected the folder of one data set of the zoo")
    try:
        with gzip.open(folder / "metrics.csv.gz", "rt", newline="") as file:
            metrics = list(csv.DictReader(file))
        rows = numpy.load(folder / "weights.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{folder}: weights.npy or metrics.csv.gz is truncated or corrupt: {error}") from error
    if len(rows) != len(metrics):
        raise DataError(f"{folder / 'metrics.csv.gz'} describes {len(metrics)} networks; weights.npy has {len(rows)}")
    at_step = [k for k, row in enumerate(metrics) if float(row["step"]) == step]
    found = sorted({metrics[k]["config.activation"] for k in at_step})
    if activation is None and len(found) > 1:
        raise DataError(f"{folder} has networks with activations {found}: choose one")
    half = len(at_step) // 2
    places = {k: 2 if place >= half else int(place >= 0.9 * half) for place, k in enumerate(at_step)}
    chosen = [k for k in at_step if activation in (None, metrics[k]["config.activation"])]
    if not chosen:
        found = sorted({row["config.activation"] for row in metrics})
        raise DataError(f"{folder} has no network with activation {activation!r} at step {step}; it has {found}")
    features = from_zoo_rows(rows[chosen].astype(numpy.float32), folder / "layout.csv")
    _require_finite(features, folder / "weights.npy", chosen)
    columns = {
        "accuracy": torch.tensor([float(metrics[k]["test_accuracy"]) for k in chosen]),
        "network": torch.tensor(chosen),
        "split": torch.tensor([places[k] for k in chosen], dtype=torch.uint8),
    }
    return Networks(features, metrics[chosen[0]]["config.activation"], columns, {"images": folder.name})


def siren_files(folder: Path) -> list[tuple[int, int, Path]]:
    """Index, label and path of every SIREN in folders `<prefix>_<label>s/…net<index>.pth`, by index."""
    files = []
    for path in folder.glob("**/*.pth"):
        label, index = CLASS_FOLDER.search(path.parent.name), SIREN_FILE.search(path.name)
        if label and index:
            files.append((int(index[1]), int(label[1]), path))
    return sorted(files)


def read_sirens(folder: Path) -> Networks:
    """SIRENs of the NP paper: each file the state_dict of a network, the label in the name of its folder.

    By index, the first 9 of 12 networks are for training, the next for validation, the last two for testing: 45,000,
    5,000 and 10,000 of 60,000. Files are loaded with `weights_only`: no code in them is run.
    """
    files = siren_files(folder)
    if not files:
        raise FileNotFoundError(
            f"{folder} has no SIRENs; expected folders <prefix>_<label>s with files …net<index>.pth"
        )
    states = [_load(path) for _, _, path in track(files, f"{folder.name}: SIRENs", transient=True)]
    try:
        features = from_state_dicts(states)
    except (KeyError, ValueError) as error:
        raise DataError(f"{folder}: {error}") from error
    _require_finite(features, folder, [path.relative_to(folder) for _, _, path in files])
    place = torch.arange(len(files)) / len(files)
    columns = {
        "label": torch.tensor([label for _, label, _ in files]),
        "index": torch.tensor([index for index, _, _ in files]),
        "split": torch.bucketize(place, torch.tensor([9 / 12, 10 / 12]), right=True).to(torch.uint8),
    }
    return Networks(features, "sin", columns, {"images": folder.name})


def read_nfn(features: Any, activation: str, columns: dict[str, Tensor]) -> Networks:
    """Networks out of nfn's `WeightSpaceFeatures`, with what is known of each, `split` included."""
    networks = from_nfn(features)
    networks.check(networks.space, channels=1)
    return Networks(networks, activation, columns, {"images": "nfn"})


def _load(path: Path) -> Mapping[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, BadZipFile) as error:
        raise DataError(f"{path} is corrupt, or holds more than tensors and is not trusted: {error}") from error
    if not isinstance(content, Mapping) or not all(isinstance(x, Tensor) for x in content.values()):
        raise DataError(f"{path} holds no state_dict, a mapping of names to tensors")
    return content


def _require_finite(features: WeightFeatures, path: Path, names: list[Any]) -> None:
    finite = torch.stack([x.flatten(1).isfinite().all(1) for x in features.tensors()]).all(0)
    if not finite.all():
        raise DataError(f"{path}: network {names[int((~finite).nonzero()[0])]} holds NaN or infinity; leave it out")
