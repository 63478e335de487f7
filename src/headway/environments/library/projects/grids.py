"""Rectangles of numbers, as lists of rows."""


def transposed(rows: list[list[int]]) -> list[list[int]]:
    """Rows as columns."""
    return [list(column) for column in zip(*rows, strict=True)]


def turned(rows: list[list[int]]) -> list[list[int]]:
    """Turned clockwise by a quarter."""
    return transposed(rows[::-1])


def product(left: list[list[int]], right: list[list[int]]) -> list[list[int]]:
    """The product of two matrices. Raises ValueError where their sizes do not fit."""
    if len(left[0]) != len(right):
        raise ValueError("sizes do not fit")
    columns = transposed(right)
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left]


def neighbours(rows: list[list[int]], row: int, column: int) -> int:
    """The sum of the up to eight values around a place."""
    total = 0
    for near_row in range(max(row - 1, 0), min(row + 2, len(rows))):
        for near_column in range(max(column - 1, 0), min(column + 2, len(rows[0]))):
            if (near_row, near_column) != (row, column):
                total += rows[near_row][near_column]
    return total
