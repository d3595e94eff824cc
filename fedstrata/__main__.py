"""``python -m fedstrata`` is the command line, which the extra ``lab`` installs."""

import os
import signal
import sys

from fedstrata.support.lazy import extra


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: where what it is made of is not installed; it says how to install it.
    """
    try:
        with extra("lab", "The command line"):
            from fedstrata.lab.cli import app
    except ModuleNotFoundError as error:
        raise SystemExit(str(error)) from error
    if os.getpid() == 1:  # of a container, whose first process gets no signal that it does not handle
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app(prog_name="fedstrata")


if __name__ == "__main__":
    main()
