"""Print a shell's completions of commands, options and their values: `quire completions bash >> ~/.bashrc`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    return 0
