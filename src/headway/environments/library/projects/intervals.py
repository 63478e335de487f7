"""Intervals of whole numbers, each a pair of its first and last number."""

from itertools import pairwise


def merged(intervals: list[list[int]]) -> list[list[int]]:
    """Sorted, with those that overlap or touch joined."""
    result: list[list[int]] = []
    for first, last in sorted(intervals):
        if result and first <= result[-1][1] + 1:
            result[-1][1] = max(result[-1][1], last)
        else:
            result.append([first, last])
    return result


def covered(intervals: list[list[int]]) -> int:
    """How many numbers are in at least one interval."""
    return sum(last - first + 1 for first, last in merged(intervals))


def gaps(intervals: list[list[int]]) -> list[list[int]]:
    """The intervals between those given."""
    joined = merged(intervals)
    return [[left[1] + 1, right[0] - 1] for left, right in pairwise(joined)]
