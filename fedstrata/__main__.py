"""``python -m fedstrata`` is the command line, which the extra ``lab`` installs."""


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: where what it is made of is not installed; it says how to install it.
    """
    try:
        from fedstrata.lab.cli import app
    except ModuleNotFoundError as error:
        raise SystemExit(f"The command line needs {error.name}: pip install 'fedstrata[lab]'.") from error
    app(prog_name="fedstrata")


if __name__ == "__main__":
    main()
