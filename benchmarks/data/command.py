"""python -m benchmarks data: makes data sets of trained networks."""

from __future__ import annotations

import argparse

from benchmarks.commands import add_commands
from benchmarks.data import inr, zoo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    texts = {"zoo": "small CNNs with their test accuracies", "inr": "SIRENs that each hold an image"}
    makers = add_commands(parser, "maker", texts)
    zoo.add_arguments(makers["zoo"])
    inr.add_arguments(makers["inr"])
