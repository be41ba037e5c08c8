"""The figures of the paper's accuracy tables, as (mean, deviation)."""

from __future__ import annotations

Figures = dict[str, tuple[float, float | None]]

GENERALIZATION: dict[tuple[str, int], Figures] = {
    ("relu", 0): {
        "STATNN": (0.915, 0.002),
        "NP": (0.920, 0.003),
        "HNP": (0.926, 0.003),
        "GNN": (0.897, None),
        "ScaleGMN": (0.928, None),
        "Monomial-NFN": (0.922, 0.001),
        "MAGEP": (0.933, 0.001),
        "MAGEP: Only Non Inter-Layer terms": (0.929, None),
        "MAGEP: Only Inter-Layer terms": (0.932, None),
        "MAGEP: Non Inter-Layer terms + [W]": (0.930, None),
        "MAGEP: Non Inter-Layer terms + [WW]": (0.930, None),
        "MAGEP: Non Inter-Layer terms + [Wb]": (0.931, None),
        "MAGEP: Non Inter-Layer terms + [bW]": (0.931, None),
        "MAGEP: Non Inter-Layer terms + Inter-Layer terms": (0.933, None),
    },
    ("relu", 1): {
        "STATNN": (0.894, 0.0001),
        "NP": (0.900, 0.002),
        "HNP": (0.913, 0.001),
        "Monomial-NFN": (0.920, 0.001),
        "MAGEP": (0.933, 0.001),
    },
    ("relu", 2): {
        "STATNN": (0.853, 0.007),
        "NP": (0.898, 0.003),
        "HNP": (0.903, 0.003),
        "Monomial-NFN": (0.919, 0.001),
        "MAGEP": (0.933, 0.001),
    },
    ("relu", 3): {
        "STATNN": (0.523, 0.02),
        "NP": (0.884, 0.002),
        "HNP": (0.891, 0.003),
        "Monomial-NFN": (0.920, 0.002),
        "MAGEP": (0.932, 0.001),
    },
    ("relu", 4): {
        "STATNN": (0.516, 0.001),
        "NP": (0.884, 0.002),
        "HNP": (0.601, 0.02),
        "Monomial-NFN": (0.920, 0.001),
        "MAGEP": (0.932, 0.001),
    },
    ("tanh", 0): {
        "STATNN": (0.913, 0.0012),
        "NP": (0.925, 0.0013),
        "HNP": (0.933, 0.0019),
        "GNN": (0.893, None),
        "ScaleGMN": (0.942, None),
        "Monomial-NFN": (0.939, 0.0004),
        "MAGEP": (0.940, 0.001),
    },
}
"""Kendall's τ, by activation and i of the scales' range [1, 10^i], 0 for no augmentation."""

CLASSIFICATION: dict[str, Figures] = {
    "mnist": {
        "MLP": (10.62, 0.54),
        "NP": (69.82, 0.42),
        "HNP": (66.02, 0.51),
        "Monomial-NFN": (68.43, 0.51),
        "MAGEP": (77.55, 0.68),
    },
    "cifar10": {
        "MLP": (10.48, 0.74),
        "NP": (33.74, 0.26),
        "HNP": (31.61, 0.22),
        "Monomial-NFN": (34.23, 0.33),
        "MAGEP": (37.18, 0.30),
    },
    "fashion": {
        "MLP": (9.95, 0.36),
        "NP": (58.21, 0.31),
        "HNP": (57.43, 0.46),
        "Monomial-NFN": (61.15, 0.55),
        "MAGEP-NP": (62.83, 0.57),
    },
}
"""Accuracy in %. The paper's network for Fashion-MNIST is MAGEP-NP here."""

EDITING: dict[str, Figures] = {
    "contrast": {
        "MLP": (0.031, 0.001),
        "NP": (0.020, 0.002),
        "HNP": (0.021, 0.002),
        "Monomial-NFN": (0.020, 0.001),
        "MAGEP": (0.020, 0.001),
    },
    "dilate": {
        "MLP": (0.306, 0.001),
        "NP": (0.068, 0.002),
        "HNP": (0.071, 0.001),
        "Monomial-NFN": (0.069, 0.002),
        "MAGEP": (0.068, 0.002),
    },
}
"""Mean square error, on images whose scale the paper does not state."""


def image_set(name: str) -> str:
    """Which of the paper's image sets a data set's name or source means: a key of CLASSIFICATION, or ""."""
    name = name.lower()
    return next(
        (key for word, key in (("fashion", "fashion"), ("cifar", "cifar10"), ("mnist", "mnist")) if word in name), ""
    )
