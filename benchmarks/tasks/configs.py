"""Settings of training: the paper's, and small ones for two cores. Any other is a JSON file of the same form."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.tasks.loop import Settings

Config = dict[str, Any]

_SMALL_EDITOR: Config = {"np_channels": 24, "fourier": 32, "fourier_scale": 0.1, "start_scale": 0.1}
"""Networks are given at unit scale, see `UnitForm`. Fourier features of scale 3, meant for raw weights, then turn many
times between one network and the next, and what follows cannot tell near from far."""

CONFIGS: dict[str, dict[str, Config]] = {
    "generalization": {
        "paper": {"steps": 37_850, "batch_size": 8, "learning_rate": 1e-3, "evaluate_every": 757, "patience": 10},
        "small": {
            "steps": 1200,
            "batch_size": 32,
            "learning_rate": 2e-3,
            "schedule": "cosine",
            "warmup": 100,
            "evaluate_every": 200,
            "weight_noise": 0.2,
            "training": {"MAGEP": {"learning_rate": 4e-3, "weight_decay": 1.0}},
            "models": {"MAGEP": {"unit_paths": True, "init": "xavier_normal", "invariants": 40}},
        },
    },
    "inr-classify": {
        "paper": {"steps": 200_000, "batch_size": 32, "learning_rate": 1e-4, "evaluate_every": 3000},
        "small": {
            "steps": 1000,
            "batch_size": 32,
            "learning_rate": 3e-3,
            "schedule": "cosine",
            "warmup": 100,
            "clip": 1.0,
            "evaluate_every": 250,
            "training": {name: {"learning_rate": 1e-3} for name in ("NP", "HNP", "Monomial-NFN")},
            "models": {
                "NP": {"channels": 24, "fourier": 32, "hidden": 500},
                "HNP": {"channels": 24, "fourier": 32, "hidden": 500},
                "Monomial-NFN": {"channels": 8, "np_channels": 24, "fourier": 32},
                "MAGEP": {"channels": 24, "layers": 2, "hidden": 500},
                "MAGEP-NP": {"channels": 8, "np_channels": 24, "fourier": 32},
            },
        },
    },
    "inr-edit": {
        "paper": {"steps": 50_000, "batch_size": 32, "learning_rate": 1e-3, "evaluate_every": 1000},
        "small": {
            "steps": 600,
            "batch_size": 16,
            "learning_rate": 1e-2,
            "schedule": "cosine",
            "warmup": 50,
            "clip": 1.0,
            "evaluate_every": 300,
            "training": {"MLP": {"learning_rate": 1e-3}},
            "models": {
                "MLP": {"start_scale": 0.1},
                "NP": _SMALL_EDITOR,
                "HNP": _SMALL_EDITOR,
                "Monomial-NFN": _SMALL_EDITOR | {"channels": 8},
                "MAGEP": _SMALL_EDITOR | {"channels": 8},
            },
        },
    },
}
"""By task and name. `models` has what differs from the paper's sizes, by model; all else are fields of `Settings`, and
`training` has those that differ for one model.

MAGEP in "small" divides networks by their scale: among those that `data zoo` makes are some of very large weights.
"""


def read_config(task: str, name: str) -> Config:
    """The config of this name, or in this JSON file."""
    if name in CONFIGS[task]:
        return CONFIGS[task][name]
    path = Path(name)
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        known = ", ".join(CONFIGS[task])
        raise FileNotFoundError(f"no config {name!r} of {task}: expected one of {known}, or a JSON file") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    known_fields = {field.name for field in fields(Settings)} - {"model"} | {"models", "training"}
    unknown, missing = (
        set(config) - known_fields,
        {"steps", "batch_size", "learning_rate", "evaluate_every"} - set(config),
    )
    if unknown or missing:
        raise ValueError(
            f"{path} has unknown keys {sorted(unknown)}, lacks {sorted(missing)}; known are {sorted(known_fields)}"
        )
    return config


def settings(config: Config, system: str, **changes: Any) -> Settings:
    """Settings for one model; changes that are None are none."""
    name = system.partition(":")[0]
    plain = {key: value for key, value in config.items() if key not in ("models", "training")}
    plain |= config.get("training", {}).get(name, {})
    plain |= {key: value for key, value in changes.items() if value is not None}
    return Settings(**plain, model=config.get("models", {}).get(name, {}))
