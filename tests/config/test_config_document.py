"""Files, mappings and overrides: what is read, and what is refused before the schema is asked."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import load_config
from headway.config.config_tree import parse_devices

from .factory import only_problem, problems_of


def test_a_missing_file_is_named() -> None:
    assert "no/such.yaml" in only_problem("no/such.yaml")


def test_broken_yaml_is_located(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("seed: 1\nexp_name: [a, b\nmax_steps: 3\n")
    assert "broken.yaml, line 3, column 10" in only_problem(file)


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "a list"), ("hello", "a single value")])
def test_a_file_that_is_no_mapping_is_refused(text: str, kind: str) -> None:
    assert kind in only_problem(io.StringIO(text))


def test_an_anchor_that_contains_itself_is_refused() -> None:
    assert "contains itself" in only_problem(io.StringIO("seed: &a [*a]\n"))


def test_an_empty_file_is_an_empty_configuration() -> None:
    assert load_config(io.StringIO("# nothing\n")).config == load_config().config


def test_a_repeated_key_is_refused_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("actor_train:\n  infer_batch_size: 1\n  infer_batch_size: 2\n")
    assert "actor_train.infer_batch_size: given twice, at twice.yaml:2 and twice.yaml:3" in only_problem(file)


def test_a_key_given_dotted_and_nested_is_given_twice() -> None:
    text = "actor_train.infer_batch_size: 1\nactor_train:\n  infer_batch_size: 2\n"
    assert "given twice" in only_problem(io.StringIO(text))


def test_anchors_and_merge_keys_work() -> None:
    text = "actor_train: &a\n  model_args: {dtype: fp32}\nactor_infer:\n  <<: *a\n  device_mapping: [4]\n"
    config = load_config(io.StringIO(text)).config
    assert (config.actor_infer.model_args.dtype, config.actor_infer.device_mapping) == ("fp32", (4,))


@pytest.mark.parametrize("source", ["1e-6", 1e-6, "0.000001"])
def test_numbers_written_as_text_are_numbers_where_a_number_is_expected(source: object) -> None:
    given = {"actor_train": {"training_args": {"learning_rate": source}}}
    assert load_config(given).config.actor_train.training_args.learning_rate == 1e-6


def test_exponents_without_a_point_are_numbers_even_in_free_form_blocks() -> None:
    text = "custom_envs:\n  lake:\n    env_config:\n      slip: 1e-3\n"
    assert load_config(io.StringIO(text)).config.custom_envs["lake"].env_config == {"slip": 0.001}


@pytest.mark.parametrize(
    "text",
    [
        "seed=7",
        "+seed=7",
        "++seed=7",
        "seed=7 \\",
        "seed = 7",
        "'seed=7'",
        "# comment\n  +seed=7 \\\n\n",
        "seed=7  # why not",
    ],
)
def test_overrides_are_accepted_as_pasted(text: str) -> None:
    assert load_config({"seed": 1}, [text]).config.seed == 7


def test_overrides_hold_lists_maps_text_and_null() -> None:
    config = load_config(
        {"actor_infer": {"generating_args": {"temperature": 0.5}}},
        [
            "actor_infer.generating_args={stop: [a, b], top_p: 0.9}",
            "exp_name='a b'",
            "val_batch_size=null",
        ],
    ).config
    assert config.actor_infer.generating_args.stop == ("a", "b")
    assert (config.actor_infer.generating_args.top_p, config.actor_infer.generating_args.temperature) == (0.9, 0.5)
    assert (config.exp_name, config.val_batch_size) == ("a b", None)


def test_a_later_override_wins() -> None:
    assert load_config(None, ["seed=1", "seed=2"]).config.seed == 2


@pytest.mark.parametrize("text", ["seed", "=7", "a..b=1", "seed.=1", "se ed=1"])
def test_an_override_without_a_key_and_a_value_is_refused(text: str) -> None:
    assert text in only_problem(None, [text])


def test_all_problems_of_a_file_are_reported_together() -> None:
    problems = problems_of(
        {"sed": 1, "max_steps": 0, "staleness_policy": "drp", "actor_train": {"device_mapping": "x"}}
    )
    assert {problem.key for problem in problems} == {
        "sed",
        "max_steps",
        "staleness_policy",
        "actor_train.device_mapping",
    }


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,4))", (0, 1, 2, 3)),
        ("list(range(0, 8, 2))", (0, 2, 4, 6)),
        ("range(2)", (0, 1)),
        (" list( range( 4 , 6 ) ) ", (4, 5)),
        ("[1, 3]", (1, 3)),
    ],
)
def test_device_texts_are_parsed(text: str, devices: tuple[int, ...]) -> None:
    assert parse_devices(text) == devices


@pytest.mark.parametrize(
    "text", ["list(range(0,4)", "range(0,4))", "range(4,0,-1)", "range(1,2,0)", "exit()", "[a]", "range()"]
)
def test_other_device_texts_are_refused(text: str) -> None:
    assert parse_devices(text) is None


@settings(deadline=None)
@given(st.text(alphabet="listrange(),0123456789 []", max_size=30))
def test_no_device_text_raises(text: str) -> None:
    parsed = parse_devices(text)
    assert parsed is None or all(isinstance(device, int) for device in parsed)


def test_a_device_named_twice_is_refused() -> None:
    assert "names a device twice" in only_problem({"actor_train": {"device_mapping": [0, 1, 1]}})
