"""Evaluates asserts on values that a program computed, in a process that has never seen the program.

A check that is made of comparisons, arithmetic, plain builtins and `math` alone is evaluated in a reward worker, which
costs a millisecond. Any other check comes with code of the data set, so this file itself runs it in a sandbox of its
own, as a program: it imports nothing of this package.
"""

import ast
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

_BUILTINS: dict[str, Any] = {
    function.__name__: function
    for function in (
        *(abs, all, any, bool, bytes, complex, dict, divmod, enumerate, filter, float, frozenset, int, isinstance),
        *(iter, len, list, map, max, min, next, range, reversed, round, set, sorted, str, sum, tuple, zip),
    )
}
_STATEMENTS = (ast.Module, ast.Assert, ast.Assign, ast.Import, ast.alias, ast.Store, ast.Load)
_EXPRESSIONS = (
    *(ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.IfExp, ast.Constant, ast.Name, ast.Call, ast.keyword),
    *(ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Subscript, ast.Slice, ast.Attribute, ast.Starred),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


def is_plain_check(check: str) -> bool:
    """Return whether a check can do nothing but compute: it reaches no attribute, module or builtin that could."""
    tree = ast.parse(check)
    defined = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return all(_is_plain(node, defined) for node in ast.walk(tree))


def _is_plain(node: ast.AST, defined: set[str]) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name == "math" and alias.asname is None for alias in node.names)
    if isinstance(node, ast.Attribute):
        of_math = isinstance(node.value, ast.Name) and node.value.id == "math" and "math" not in defined
        return of_math and not node.attr.startswith("_")
    if isinstance(node, ast.Name):
        return node.id in _BUILTINS or node.id in defined or node.id == "math" or node.id.startswith("_headway_")
    return isinstance(node, (*_STATEMENTS, *_EXPRESSIONS))


def count_held(checks: Sequence[tuple[str, Any]]) -> int:
    """Return how many plain checks hold for their values. Runs in a worker."""
    held = 0
    for check, values in checks:
        body = [one for one in ast.parse(check).body if not isinstance(one, ast.Import)]
        code = compile(ast.Module(body=body, type_ignores=[]), "<check>", "exec")
        held += _holds(code, values, {"__builtins__": _BUILTINS, "math": math})
    return held


def _holds(code: Any, values: Any, names: dict[str, Any]) -> bool:
    try:
        names.update((f"_headway_{number}", value) for number, value in enumerate(restore(values)))
        exec(code, names)
    except BaseException:  # a check that fails, or values that are none
        return False
    return True


def restore(value: Any) -> Any:
    """Return a value from the form in which the harness writes it. Raises an exception if it is none."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("no value of the harness")
        return value
    ((kind, content),) = value.items()
    if kind in ("list", "tuple", "set"):
        return {"list": list, "tuple": tuple, "set": set}[kind](map(restore, content))
    if kind == "dict":
        return {restore(key): restore(item) for key, item in content}
    if kind == "complex":
        return complex(*map(float, content))
    if kind not in ("float", "bytes"):
        raise ValueError(f"{kind} is no value that can be compared")
    return float(content) if kind == "float" else bytes.fromhex(content)


def main() -> None:
    """Read checks and values, and write how many hold."""
    verdict = os.dup(1)
    os.dup2(2, 1)
    held = sum(_holds(check, values, {"__name__": "check"}) for check, values in json.load(sys.stdin))
    os.write(verdict, str(held).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
