"""How well a picture shows the text it should: compared with what a reader found in it.

The rule of the OCR reward: 1 where the target is contained in what was read, else 1 − min(distance, length)/length of
the target, with Levenshtein's distance. Case and white space do not count.
"""

from __future__ import annotations


def agreement(target: str, found: str) -> float:
    """0 … 1. Raises `ValueError` for an empty target, which every picture would show."""
    wanted, read = folded(target), folded(found)
    if not wanted:
        raise ValueError(f"the target {target!r} has no letters to look for")
    if wanted in read:
        return 1.0
    return 1.0 - min(distance(wanted, read), len(wanted)) / len(wanted)


def folded(text: str) -> str:
    """Without case and white space."""
    return "".join(text.split()).casefold()


def distance(one: str, other: str) -> int:
    """Letters to insert, remove or replace."""
    row = list(range(len(other) + 1))
    for above, letter in enumerate(one, start=1):
        corner, row[0] = row[0], above
        for place, against in enumerate(other, start=1):
            corner, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, corner + (letter != against))
    return row[-1]
