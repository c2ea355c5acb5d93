"""Command line: ``python -m torch_paged info [--report]``, or ``torch-paged info``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_paged import environment
from torch_paged._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    # As it was called: by the installed script, or as a module.
    script = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(
        prog=script if script == "torch-paged" else "python -m torch_paged",
        description="Look at torch_paged and at what it runs on.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, devices and the kernels in use")
    info.add_argument(
        "--report", action="store_true", help="more of it, as Markdown for a bug report"
    )
    arguments = parser.parse_args(argv)
    rows = environment.describe(full=arguments.report)
    if arguments.report:
        print(environment.format_markdown(rows))
    else:
        print(environment.format_text(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
