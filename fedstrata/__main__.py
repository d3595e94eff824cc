"""``python -m fedstrata`` is the command line."""

from fedstrata.cli import app

if __name__ == "__main__":
    app(prog_name="fedstrata")
