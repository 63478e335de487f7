"""What worker processes do for `mathematics`. Imported only there: math-verify is optional and slow to load."""

from __future__ import annotations

import logging

from math_verify import parse, verify


def prepare() -> None:
    """Compile what the first call would, outside its time."""
    logging.disable(logging.CRITICAL)  # that the library's own limits are off is known
    is_equal_value("$\\frac{1}{2}$", "\\boxed{0.5} is 1/2", 6, True)


def is_equal_value(gold: str, text: str, precision: int, strict: bool) -> bool:
    """Whether the answer in `text` is `gold`."""
    wanted = parse(gold, parsing_timeout=None)
    if not wanted or ("\\" in gold and "$" not in gold and "boxed" not in gold):
        wanted = parse(f"${gold}$", parsing_timeout=None) or wanted
    if not wanted:
        raise ValueError(f"the task's answer {gold[:200]!r} is no mathematics that can be read")
    found = parse(text, parsing_timeout=None)
    return bool(found) and bool(
        verify(wanted, found, float_rounding=precision, strict=strict, timeout_seconds=None, raise_on_error=False)
    )
