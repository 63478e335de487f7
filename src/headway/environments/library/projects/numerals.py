"""Roman numerals from 1 to 3999."""

SYMBOLS = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip


def to_roman(number: int) -> str:
    """Raises ValueError for numbers that have no numeral."""
    if not 1 <= number <= 3999:
        raise ValueError(f"{number} has no numeral")
    text = ""
    for value, symbol in SYMBOLS:
        while number >= value:
            text += symbol
            number -= value
    return text


def from_roman(text: str) -> int:
    """The number of a numeral, in either case. Raises ValueError for other texts."""
    number, rest = 0, text.upper()
    for value, symbol in SYMBOLS:
        while rest.startswith(symbol):
            number += value
            rest = rest[len(symbol) :]
    if rest or not text or to_roman(number) != text.upper():
        raise ValueError(f"{text!r} is no numeral")
    return number
