"""The command line of the benchmarks."""

import argparse

from benchmarks import compile, layers, model, scaling, tables
from benchmarks.data import command as data
from benchmarks.tasks import accuracy
from benchmarks.tasks import command as train


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Memory and runtime benchmarks.")
    commands = parser.add_subparsers(required=True, metavar="command")
    layers.add_arguments(commands.add_parser("layers", help="one layer, implementation against implementation"))
    scaling.add_arguments(commands.add_parser("scaling", help="cost against width, depth, channels and batch"))
    tables.add_arguments(commands.add_parser("tables", help="the paper's efficiency tables, with every rival system"))
    compile.add_arguments(commands.add_parser("compile", help="Triton kernels compiled for GPUs that need not be here"))
    model.add_arguments(commands.add_parser("model", help="bytes, flops and launches counted, time on GPUs predicted"))
    data.add_arguments(
        commands.add_parser("data", help="trained networks to learn from: a zoo of CNNs, SIRENs of images")
    )
    train.add_arguments(commands.add_parser("train", help="a task of the paper on trained networks"))
    accuracy.add_arguments(commands.add_parser("accuracy", help="the paper's accuracy tables in small, with a report"))
    arguments = parser.parse_args()
    arguments.run(arguments)


main()
