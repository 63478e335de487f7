"""Texts: titles for addresses, counted words, lines of a given width."""

import re


def slug(title: str) -> str:
    """Lower case letters and digits, joined by single hyphens."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def commonest(text: str, count: int) -> list[str]:
    """The `count` most frequent words in lower case; equally frequent ones in alphabetical order."""
    words = re.findall(r"[a-z]+", text.lower())
    return sorted(dict.fromkeys(words), key=lambda word: (-words.count(word), word))[:count]


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, broken between words; longer words have a line of their own."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
