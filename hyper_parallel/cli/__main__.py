"""``python -m hyper_parallel.cli`` and the console script: says what to install where the extra is missing."""

from __future__ import annotations

import sys

_PACKAGES = ("matplotlib", "rich", "typer", "yaml")


def main() -> None:
    """Run the command line; exit status 2 for bad input."""
    try:
        from hyper_parallel.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        sys.exit(f"hyper-parallel: {error.name} is missing: pip install 'hyper-parallel[cli]'")
    app()


if __name__ == "__main__":
    main()
