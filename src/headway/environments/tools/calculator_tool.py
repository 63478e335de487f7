"""A calculator tool: evaluates arithmetic without running any code.

It reads numbers, `+ - * / // % **`, parentheses, a few functions and constants, and nothing else. Whole numbers are
exact up to 4,000 bits; expressions that would give longer numbers, or are nested too deeply, are refused before they
are computed.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from headway.environments.tools.base import Tool, ToolArguments, ToolRefused, make_schema

Number = int | float
_MAX_CHARACTERS, _MAX_BITS = 500, 4000
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "min": min, "max": max, "round": round, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "log10": math.log10, "log2": math.log2, "sin": math.sin, "cos": math.cos, "tan": math.tan, "floor": math.floor,
    "ceil": math.ceil, "gcd": math.gcd, "lcm": math.lcm,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> str:
    """Return the value of an expression as text. Raises `ToolRefused`."""
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    if not 0 < len(text) <= _MAX_CHARACTERS:
        raise ToolRefused(f"an expression has 1 to {_MAX_CHARACTERS} characters")
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except ToolRefused:
        raise
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolRefused(f"cannot be read or has no value: {expression.strip()}") from None
    except (ArithmeticError, TypeError) as error:
        raise ToolRefused(f"has no value: {error}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolRefused("has no finite value")
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _check_size(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _check_real(_UNARY[type(sign)](_evaluate(operand)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(sign, ast.Pow):
                _check_power(a, b)
            return _check_real(_BINARY[type(sign)](a, b))
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in _FUNCTIONS and given:
            numbers = [_evaluate(one) for one in given]
            if name == "round" and len(numbers) == 2 and abs(numbers[1]) > _MAX_BITS:
                raise ToolRefused("that many digits are not rounded")
            return _check_real(_FUNCTIONS[name](*numbers))
    raise ToolRefused(f"only numbers, + - * / // % **, parentheses and {', '.join([*_FUNCTIONS, *_CONSTANTS])}")


def _check_power(base: Number, exponent: Number) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base).bit_length() * abs(exponent) > _MAX_BITS:
        raise ToolRefused("the number is too long")


def _check_real(value: object) -> Number:
    if not isinstance(value, int | float):
        raise ToolRefused("is no real number")
    return _check_size(value)


def _check_size(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ToolRefused("the number is too long")
    return value


async def _call_calculator(arguments: ToolArguments) -> str:
    return calculate(arguments["expression"])


CALCULATOR_TOOL = Tool(
    name="calculator",
    description="Value of an arithmetic expression, such as (3 + 4) * sqrt(2).",
    parameters=make_schema({"expression": "string"}),
    call=_call_calculator,
)
