"""What the command lines have in common."""

from __future__ import annotations

import argparse

import torch


def add_commands(
    parser: argparse.ArgumentParser, what: str, texts: dict[str, str]
) -> dict[str, argparse.ArgumentParser]:
    """A parser for each command, by name; the one that is given is the attribute `what` of the arguments."""
    commands = parser.add_subparsers(required=True, metavar=what, dest=what)
    return {name: commands.add_parser(name, help=text, description=text) for name, text in texts.items()}


def check_device(name: str) -> None:
    """Raises ValueError unless torch can compute there."""
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"--device {name} cannot be used here: {reason}; cpu always can") from error
