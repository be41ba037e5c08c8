"""The command line of the benchmarks."""

import argparse

from benchmarks import layers


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Memory and runtime benchmarks.")
    commands = parser.add_subparsers(required=True, metavar="command")
    layers.add_arguments(commands.add_parser("layers", help="one layer, backend against backend"))
    arguments = parser.parse_args()
    arguments.run(arguments)


main()
