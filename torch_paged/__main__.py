"""Command line: ``python -m torch_paged info | support | check``, or ``torch-paged``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_paged import environment
from torch_paged._version import __version__
from torch_paged.generate.check import command as check
from torch_paged.generate.support import command as support


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    # As it was called: by the installed script, or as a module.
    script = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(
        prog=script if script == "torch-paged" else "python -m torch_paged",
        description="Look at torch_paged, at what it runs on and at what it runs.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, devices and the kernels in use")
    info.add_argument(
        "--report", action="store_true", help="more of it, as Markdown for a bug report"
    )
    support.add_arguments(
        commands.add_parser("support", help="every causal-LM type: tier, and equal or not")
    )
    check.add_arguments(
        commands.add_parser("check", help="where a model's step parts from Hugging Face's")
    )
    arguments = parser.parse_args(argv)
    if arguments.command == "support":
        return support.run(arguments)
    if arguments.command == "check":
        return check.run(arguments)
    rows = environment.describe(full=arguments.report)
    if arguments.report:
        print(environment.format_markdown(rows))
    else:
        print(environment.format_text(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
