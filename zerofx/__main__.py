"""``python -m zerofx <command>``: look at programs from the command line."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from zerofx.cli import COMMANDS
from zerofx.errors import CommandError


def parser() -> argparse.ArgumentParser:
    """The command line's parser, with every command that there is."""
    top = argparse.ArgumentParser(
        prog="python -m zerofx", description="Look at what zerofx has compiled."
    )
    subparsers = top.add_subparsers(title="commands", metavar="command", required=True)
    for add_to in COMMANDS:
        add_to(subparsers)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 1, and a line on stderr, if it cannot be done."""
    chosen = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names are in any alphabet
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return chosen.run(chosen)
    except BrokenPipeError:  # who reads has seen enough: ``| head``
        sys.stderr.close()
        return 1
    except (CommandError, OSError) as error:
        print(f"zerofx: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
