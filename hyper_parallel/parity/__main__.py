"""``python -m hyper_parallel.parity``: run the parity suite, and print a table."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from hyper_parallel.parity.command import main
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("parity: typer is missing: pip install 'hyper-parallel[parity]'")
    sys.exit(main())
