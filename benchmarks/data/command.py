"""python -m benchmarks data: makes data sets of trained networks."""

from __future__ import annotations

import argparse

from benchmarks.data import inr, zoo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    makers = parser.add_subparsers(required=True, metavar="maker")
    zoo.add_arguments(makers.add_parser("zoo", help="small CNNs with their test accuracies"))
    inr.add_arguments(makers.add_parser("inr", help="SIRENs that each hold an image"))
