"""The published scaling tables, replayed by the real flow on the virtual clock; the parts are in `scaling/`.

    python benchmarks/scaling.py [--quick] [--full] [--write] [--table NAME]

Exit code 1 if a checked cell is more than 15 % off without being on the list of known ones.
"""

from scaling.__main__ import main  # the package beside this file

if __name__ == "__main__":
    raise SystemExit(main())
