"""Splits the asserts of a data set into what the program under test computes and what decides about it.

The calls of the program run beside it in the sandbox. Their values come back as data, and everything that compares them
runs in another process that has never seen the program: `abs(f(1) - 0.3) < 1e-6` becomes `f(1)` for the first process
and `abs(_headway_0 - 0.3) < 1e-6` for the second. So a program gains nothing by an `__eq__` that is always true, by
another `math.isclose`, or by writing `True` where the values go, and it does not see what it is compared with.

A name belongs to the judge if it is a builtin, or if a statement before the assert defines it without the program's
help; every other name is the program's. A test in which the program itself would decide is refused.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeGuard

from headway.errors import RewardError

_DECISIONS = (ast.Compare, ast.BoolOp, ast.Not, ast.IfExp, ast.Lambda)
_PREDICATES = frozenset({"all", "any", "bool", "callable", "hasattr", "isinstance", "issubclass"})
_CONTROL = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If, ast.While, ast.Try, ast.Match, ast.Assert)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_BUILTINS = frozenset(dir(builtins))
_MODULES = {"math": "math", "cmath": "cmath", "statistics": "statistics", "re": "re", "np": "numpy", "numpy": "numpy"}
"""Modules that asserts use without an import, because the data set's own solutions import them."""
_PROGRAM_MODULES = frozenset({"solution", "main", "__main__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """An expression that calls the program's functions, and its value."""

    setup: str = ""
    expression: str
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTest:
    """A list of the program's values, and a check of these values that runs without the program."""

    setup: str
    expression: str
    check: str
    """Statements that raise an exception unless the values, called `_headway_0` and so on, are right."""


def split_assert(text: str) -> CallTest | AssertTest:
    """Split a text that ends with an assert. Raises `RewardError` if it is no test that can be judged from outside."""
    body = _parse(text)
    if not body or not isinstance(body[-1], ast.Assert):
        raise RewardError(f"{text[:200]!r} is no test: it does not end with an assert")
    return _split(body, text)


def split_call(setup: str, call: str, expected: Any) -> CallTest | AssertTest:
    """Split a call with an expected value in the same way."""
    body = _parse(f"{setup}\nassert ({call}) == 0")
    last = body[-1]
    assert isinstance(last, ast.Assert) and isinstance(last.test, ast.Compare)
    if not _decides(last.test.left):
        test = _split(body, call)
        if isinstance(test, CallTest):
            return CallTest(setup=test.setup, expression=test.expression, expected=expected)
    return split_assert(f"{setup}\nassert ({call}) == {expected!r}")


def _parse(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"{text[:200]!r} is no test: {error}") from error


def _split(body: Sequence[ast.stmt], text: str) -> CallTest | AssertTest:
    for known in (
        _BUILTINS | _MODULES.keys(),
        frozenset[str](),
    ):  # a program may be about a function with the name of a builtin
        splitter = _AssertSplitter(known, text)
        for statement in deepcopy(body):
            splitter.add(statement)
        if splitter.values:
            return splitter.make_simple_test(body) or splitter.make_test()
    raise RewardError(f"{text[:200]!r} is no test: it does not call the program")


class _AssertSplitter:
    """Goes through the statements of one test."""

    def __init__(self, known: frozenset[str], text: str) -> None:
        self._known, self._text = set(known), text
        self._variables: set[str] = set()
        """Known names of data, which the program may change if it gets them."""
        self._inside: list[ast.stmt] = []
        self._outside: list[ast.stmt] = []
        self.values: list[str] = []
        """The program's expressions, in the order in which they are evaluated."""

    def add(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assert):
            self._add_assert(statement)
        elif _loaded_names(statement) <= self._known and not _imports_program(statement):
            self._inside.append(statement)
            self._outside.append(statement)
            names = _stored_names(statement)
            self._known |= names
            if not isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
                self._variables |= names
        else:
            if any(isinstance(part, (*_DECISIONS, *_CONTROL)) for part in ast.walk(statement)):
                raise self.refuse(ast.unparse(statement))
            self._inside.append(statement)
            touched = _stored_names(statement) | _loaded_names(statement) & self._variables
            self._known -= touched
            self._variables -= touched

    def _add_assert(self, statement: ast.Assert) -> None:
        hoister = _CallHoister(self, self._known)
        self._outside.append(ast.Assert(test=hoister.visit(statement.test), msg=None))

    def hoist(self, expression: ast.expr, *, repeated: bool) -> ast.expr:
        """Let the program compute an expression; return what the judge uses in its place."""
        name = f"_headway_{len(self.values)}"
        self.values.append(ast.unparse(expression))
        self._inside += _parse(f"{name} = {ast.unparse(expression)}")
        if not repeated:
            return ast.Name(id=name, ctx=ast.Load())
        self._outside += _parse(f"{name} = iter({name})")
        return ast.Call(func=ast.Name(id="next", ctx=ast.Load()), args=[ast.Name(id=name, ctx=ast.Load())], keywords=[])

    def refuse(self, part: str) -> RewardError:
        return RewardError(
            f"{self._text[:200]!r} is no test: {part[:100]!r} would be decided beside the program; give a call and its "
            "expected value, or compare in the assert itself"
        )

    def make_simple_test(self, body: Sequence[ast.stmt]) -> CallTest | None:
        """Return a test of one value if the only assert says what the value is, else `None`."""
        last = body[-1]
        if not isinstance(last, ast.Assert) or any(isinstance(one, ast.Assert) for one in body[:-1]):
            return None
        setup = "\n".join(ast.unparse(one) for one in body[:-1])
        match last.test:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]) if not _decides(left):
                try:
                    return CallTest(setup=setup, expression=ast.unparse(left), expected=ast.literal_eval(right))
                except (ValueError, TypeError):
                    return None
        negated = isinstance(last.test, ast.UnaryOp) and isinstance(last.test.op, ast.Not)
        value = last.test.operand if isinstance(last.test, ast.UnaryOp) and negated else last.test
        if [ast.unparse(value)] == self.values:
            return CallTest(setup=setup, expression=f"bool({self.values[0]})", expected=not negated)
        return None

    def make_test(self) -> AssertTest:
        names = ", ".join(f"_headway_{number}" for number in range(len(self.values)))
        inside, outside = ("\n".join(map(ast.unparse, part)) for part in (self._inside, self._outside))
        used = set[str]().union(*map(_all_names, self._outside)) & _MODULES.keys()
        missing = sorted(used - set[str]().union(*map(_stored_names, self._outside)))
        outside = "\n".join([*(_import_text(name) for name in missing), outside])
        return AssertTest(setup=inside, expression=f"[{names}]", check=outside)


class _CallHoister(ast.NodeTransformer):
    """Replaces the program's expressions in an assert by their values."""

    def __init__(self, splitter: _AssertSplitter, known: set[str]) -> None:
        self._splitter, self._known = splitter, known
        self._bound: set[str] = set()
        self._generators: list[ast.comprehension] | None = None
        """Loops of the comprehension around the node; `None` where the number of evaluations is not that of loops."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.NamedExpr):
            raise self._splitter.refuse(ast.unparse(node))
        if isinstance(node, ast.expr) and self._is_of_program(node):
            return self._hoist(node)
        if isinstance(node, _COMPREHENSIONS):
            return self._visit_comprehension(node)
        if isinstance(node, ast.BoolOp | ast.IfExp | ast.Lambda):
            return self._visit_conditional(node)
        return self.generic_visit(node)

    def _is_of_program(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name not in self._known and name not in self._bound
            case ast.Attribute(value=base) | ast.Subscript(value=base) | ast.Call(func=base):
                return self._is_of_program(base)
        return False

    def _hoist(self, node: ast.expr) -> ast.expr:
        if not _all_names(node) & self._bound:
            return self._splitter.hoist(node, repeated=False)
        if self._generators is None:
            raise self._splitter.refuse(ast.unparse(node))
        return self._splitter.hoist(ast.ListComp(elt=node, generators=self._generators), repeated=True)

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> ast.AST:
        outer, originals = (set(self._bound), self._generators), deepcopy(node.generators)
        self._generators = None  # the program's part in loops inside loops, or in their conditions, has no fixed number
        for generator in node.generators:
            generator.iter = self.visit(generator.iter)
            self._bound |= _stored_names(generator.target)
            generator.ifs = [self.visit(condition) for condition in generator.ifs]
        self._generators = originals if not outer[0] else None
        for field in ("elt", "key", "value"):
            if hasattr(node, field):
                setattr(node, field, self.visit(getattr(node, field)))
        self._bound, self._generators = outer
        return node

    def _visit_conditional(self, node: ast.BoolOp | ast.IfExp | ast.Lambda) -> ast.AST:
        outer = set(self._bound), self._generators
        self._generators = None
        if isinstance(node, ast.Lambda):
            self._bound |= {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        self.generic_visit(node)
        self._bound, self._generators = outer
        return node


def _import_text(name: str) -> str:
    module = _MODULES[name]
    return f"import {module}" if module == name else f"import {module} as {name}"


def _decides(node: ast.AST) -> bool:
    """Return whether a part of the expression gives a verdict instead of a value."""
    return any(
        isinstance(part, _DECISIONS) or (isinstance(part, ast.Name) and part.id in _PREDICATES)
        for part in ast.walk(node)
    )


def _all_names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _loaded_names(statement: ast.AST) -> set[str]:
    """Return the names that a statement takes from outside itself."""
    loaded = {part.id for part in ast.walk(statement) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    if isinstance(statement, ast.AugAssign):
        loaded |= _all_names(statement.target)
    bound = {part.arg for part in ast.walk(statement) if isinstance(part, ast.arg)}
    for part in ast.walk(statement):
        if isinstance(part, ast.comprehension):
            bound |= _all_names(part.target)
        elif isinstance(part, ast.FunctionDef | ast.ClassDef):
            bound |= {part.name, *(one.id for one in ast.walk(part) if _is_stored(one))}
        elif isinstance(part, ast.For):
            bound |= _all_names(part.target)
    return loaded - bound


def _stored_names(node: ast.AST) -> set[str]:
    """Return the names that a statement or a target defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    names = {part.id for part in ast.walk(node) if _is_stored(part)}
    aliases = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
    return names | {alias.asname or alias.name.split(".")[0] for alias in aliases}


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def _imports_program(statement: ast.stmt) -> bool:
    """Return whether the statement imports the file in which the program lies."""
    match statement:
        case ast.Import(names=names):
            return any(alias.name.split(".")[0] in _PROGRAM_MODULES for alias in names)
        case ast.ImportFrom(module=module):
            return (module or "").split(".")[0] in _PROGRAM_MODULES
    return False
