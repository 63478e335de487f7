"""Runs of equal letters: packed, unpacked, counted."""

import re


def packed(text: str) -> str:
    """Every run as its length and its letter; runs of one have no number."""
    return "".join((str(len(run[0])) if len(run[0]) > 1 else "") + run[1] for run in re.findall(r"((\D)\2*)", text))


def unpacked(text: str) -> str:
    """What was packed. Raises ValueError for a number without a letter."""
    if text and text[-1].isdigit():
        raise ValueError("ends with a number")
    return "".join(letter * int(count or 1) for count, letter in re.findall(r"(\d*)(\D)", text))


def longest(text: str) -> int:
    """The length of the longest run; 0 of an empty text."""
    best = current = 0
    for place, letter in enumerate(text):
        current = current + 1 if place and text[place - 1] == letter else 1
        best = max(best, current)
    return best
