"""Every option refuses a wrong type, a value out of range and a misspelt name, and says what would be right."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import ConfigErrors, config_blocks, load_config, roles, schema, simulation_config
from headway.config.field_types import ConfigOption, FieldShape, NumberRange, iterate_options
from headway.config.schema import Config
from tests.config.factory import CONFIGS, nested, path_of, problems_of

OPTIONS = list(iterate_options(Config))
RANGED = [option for option in OPTIONS if option.shape.range or (option.shape.item and option.shape.item.range)]
WRONG: dict[str, Any] = {
    "bool": "maybe",
    "int": "many",
    "float": "many",
    "text": [["not", "text"]],
    "choice": "no-such-choice",
    "list": {"not": "a list"},
    "map": "not a mapping",
}


def ids(option: ConfigOption) -> str:
    return option.key


def outside(bounds: NumberRange) -> float:
    """A number that the range does not hold."""
    if bounds.ge is not None:
        return bounds.ge - 1
    return bounds.gt if bounds.gt is not None else (bounds.le or 0) + 1


@pytest.mark.parametrize("option", OPTIONS, ids=ids)
def test_a_wrong_type_is_refused_with_what_would_be_right(option: ConfigOption) -> None:
    value = WRONG[option.shape.kind]
    (problem,) = problems_of(nested(option.key, value))
    assert problem.key == path_of(option.key)
    assert repr(value) in str(problem)
    assert option.shape.describe() in str(problem)


@pytest.mark.parametrize("option", RANGED, ids=ids)
def test_a_value_out_of_range_is_refused_with_the_range(option: ConfigOption) -> None:
    shape = option.shape
    value = -2 if option.key.endswith(".top_k") else _outside(shape)  # -1 is another way to write 0 there
    (problem,) = problems_of(nested(option.key, value))
    bounds = shape.range or (shape.item and shape.item.range)
    assert problem.key.startswith(path_of(option.key))
    assert f"{value if isinstance(value, int | float) else outside(bounds):g}" in str(problem)
    assert bounds.describe() in str(problem)


def _outside(shape: FieldShape) -> Any:
    if shape.range is not None:
        return outside(shape.range)
    bad = outside(shape.item.range)
    return {"mine": bad} if shape.kind == "map" else [bad]


@pytest.mark.parametrize("option", OPTIONS, ids=ids)
def test_a_misspelt_name_is_refused_with_the_right_one(option: ConfigOption) -> None:
    (problem,) = problems_of(nested(f"{option.key}x", "value of mine"))
    assert problem.key == f"{path_of(option.key)}x"
    assert "value of mine" in str(problem)
    assert f"did you mean {path_of(option.key)}?" in str(problem)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([path_of(option.key) for option in OPTIONS]), VALUES, max_size=4))
def test_no_value_does_anything_but_load_or_be_refused(overrides: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigErrors):
        load_config(None, overrides)


def test_every_number_has_a_range() -> None:
    numbers = [option for option in OPTIONS if option.shape.kind in ("int", "float")]
    assert [option.key for option in numbers if option.shape.range is None] == []


@pytest.mark.parametrize("option", OPTIONS, ids=ids)
def test_every_default_is_inside_its_own_range(option: ConfigOption) -> None:
    if option.shape.range is None or option.default in (None, dataclasses.MISSING):
        return
    assert option.shape.range.holds(option.default)


def test_the_list_of_options_is_as_pinned() -> None:
    pinned = (CONFIGS.parent / "config_options.txt").read_text().splitlines()
    assert [option.key for option in OPTIONS] == pinned, "a new option is a deliberate act: add it to the list"


@pytest.mark.parametrize(
    "module", [schema, roles, config_blocks, simulation_config], ids=lambda module: module.__name__
)
def test_every_field_is_followed_by_its_meaning(module: Any) -> None:
    bare = []
    for block in [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]:
        for field, after in zip(block.body, [*block.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and not (
                isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            ):
                bare.append(f"{block.name}.{ast.unparse(field.target)}")
    assert bare == []


def test_the_defaults_alone_can_run() -> None:
    assert load_config().derived.async_generation_ratio == 0
