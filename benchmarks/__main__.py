"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys

try:
    from benchmarks import compile, layers, model, scaling, tables
    from benchmarks.commands import add_commands, check_device
    from benchmarks.data import command as data
    from benchmarks.tasks import accuracy
    from benchmarks.tasks import command as train
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error}; benchmarks need more than the layers do: pip install --no-build-isolation -e '.[bench,data]'"
    )

COMMANDS = {
    "layers": (layers, "one layer, implementation against implementation"),
    "scaling": (scaling, "cost against width, depth, channels and batch"),
    "tables": (tables, "the paper's efficiency tables, with every rival system"),
    "compile": (compile, "Triton kernels compiled for GPUs that need not be here"),
    "model": (model, "bytes, flops and launches counted, time on GPUs predicted"),
    "data": (data, "trained networks to learn from: a zoo of CNNs, SIRENs of images"),
    "train": (train, "a task of the paper on trained networks"),
    "accuracy": (accuracy, "the paper's accuracy tables in small, with a report"),
}


def build_parser() -> argparse.ArgumentParser:
    text = "Speed and memory of the layers, the paper's tables, and its tasks from data to accuracy."
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=text)
    commands = add_commands(parser, "command", {name: text for name, (_, text) in COMMANDS.items()})
    for name, (module, _) in COMMANDS.items():
        module.add_arguments(commands[name])
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    try:
        check_device(getattr(arguments, "device", "cpu"))
        arguments.run(arguments)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        # All of them say what is wrong with a file, an option or the installation: a traceback would bury it.
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; what was finished is kept", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
