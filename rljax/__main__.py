"""`python -m rljax`, the same as the command `rljax`."""

if __name__ == "__main__":
    # Inside the guard: environment workers are spawned and import this file again, without needing the command line.
    from rljax.cli import main

    raise SystemExit(main())
