"""Days of the Gregorian calendar."""

LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_leap(year: int) -> bool:
    """Whether a year has a 29th of February."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in(year: int, month: int) -> int:
    """Days of a month from 1 to 12. Raises ValueError for other months."""
    if not 1 <= month <= 12:
        raise ValueError(f"there is no month {month}")
    return LENGTHS[month - 1] + (1 if month == 2 and is_leap(year) else 0)


def day_of_year(year: int, month: int, day: int) -> int:
    """1 for the first of January. Raises ValueError for days that the month does not have."""
    if not 1 <= day <= days_in(year, month):
        raise ValueError(f"there is no day {day} in month {month}")
    return sum(days_in(year, earlier) for earlier in range(1, month)) + day
