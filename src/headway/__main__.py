"""`python -m headway` is `headway`."""

from headway.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
