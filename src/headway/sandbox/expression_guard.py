"""Keeps answers from running code where a library evaluates them as Python.

reasoning-gym calls `eval` on answers to some tasks and sympy's `parse_expr`, which calls `eval` too, on answers to
others. An answer could so read files, or change the checker for every later answer. After `guard_evaluation` both
accept arithmetic and mathematics, and nothing else: no attributes, no comprehensions, no names but those of sympy's
classes and constants and of a few functions, and no powers or factorials that would take for ever.
"""

import ast
import sys
from collections.abc import Mapping
from typing import Any

_ARITHMETIC = (
    ast.Expression,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.expr_context,
)
_SYMBOLIC = (*_ARITHMETIC, ast.Name, ast.Call, ast.keyword, ast.Compare, ast.cmpop)
_FUNCTIONS = frozenset({"sqrt", "cbrt", "root", "abs"})
_GROWING_CALLS = frozenset(
    {"Pow", "factorial", "factorial2", "subfactorial", "gamma", "binomial", "fibonacci", "primorial"}
)
_MAX_EXPONENT = 10_000
_NUMBER_PUZZLES, _PUZZLE_CHARACTERS = ("countdown", "puzzle24"), frozenset("0123456789+-*/() \t\n")
"""Tasks to combine given numbers by the four operations; the library would accept constants, functions and powers."""


def guard_evaluation() -> None:
    """Guard sympy's parser, and every module of reasoning-gym that is loaded now."""
    from sympy.parsing import sympy_parser

    stringify = sympy_parser.stringify_expr

    def stringify_guarded(text: str, local_dict: Any, global_dict: Any, transformations: Any) -> str:
        code = str(stringify(text, local_dict, global_dict, transformations))
        check_symbolic(code, local_dict, global_dict)
        return code

    if stringify.__name__ != stringify_guarded.__name__:
        sympy_parser.stringify_expr = stringify_guarded
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and module is not None:
            vars(module)["eval"] = evaluate_arithmetic


def score_puzzle(dataset: Any, task: str, text: str, entry: Mapping[str, Any]) -> float:
    """Return the score, from 0 to 1, that a data set of reasoning-gym gives; call `guard_evaluation` before."""
    if task in _NUMBER_PUZZLES and (set(text) - _PUZZLE_CHARACTERS or "**" in text or "//" in text):
        return 0.0
    return min(max(float(dataset.score_answer(text, entry)), 0.0), 1.0)


def evaluate_arithmetic(text: str, *spaces: Any) -> Any:
    """Return the value of numbers, texts, lists and arithmetic. Raises `ValueError` for anything else."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _ARITHMETIC):
            raise ValueError(f"{type(node).__name__} is no arithmetic")
    check_growth(tree)
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})


def check_symbolic(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> None:
    """Check the Python code that sympy makes of an expression. Raises `ValueError` if it is no mathematics."""
    from sympy import Basic

    tree = ast.parse(code.strip(), mode="eval")
    check_growth(tree)
    for node in ast.walk(tree):
        if not isinstance(node, _SYMBOLIC):
            raise ValueError(f"{type(node).__name__} is no mathematics")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name | ast.Call):
            raise ValueError("only mathematical functions are called")
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS and node.id not in local_dict:
            value = global_dict.get(node.id)
            if not isinstance(value, Basic) and not (isinstance(value, type) and issubclass(value, Basic)):
                raise ValueError(f"{node.id} is no mathematics")


def check_growth(tree: ast.AST) -> None:
    """Refuse powers, shifts, factorials and repetitions that are too large. Raises `ValueError`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = [side for side in (node.left, node.right) if _read_number(side) is None]
            if any(isinstance(side, ast.List | ast.Tuple | ast.Constant) for side in sides):
                raise ValueError("only numbers are multiplied")
    if _measure_growth(tree) > _MAX_EXPONENT:
        raise ValueError("too large")


def _measure_growth(node: ast.AST) -> float:
    """Return a bound of the exponents that are applied one after the other."""
    inner = max((_measure_growth(child) for child in ast.iter_child_nodes(node)), default=1.0)
    exponents: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
        exponents = [node.right]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _GROWING_CALLS:
        exponents = node.args
    for exponent in exponents:
        if _measure_growth(exponent) > 1:
            return float("inf")  # a power in the exponent
        numbers = [_read_number(part) or 0 for part in ast.walk(exponent)]
        inner *= max(1.0, sum(min(abs(number), 2 * _MAX_EXPONENT) for number in numbers))
        inner *= 1.0 if not any(isinstance(part, ast.Mult) for part in ast.walk(exponent)) else _MAX_EXPONENT
    return min(inner, float("inf"))


def _read_number(node: ast.AST) -> int | float | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None
