"""Files that include others, text that stays text, and limits on what is read."""

from pathlib import Path

import pytest

from headway.config import load_config
from headway.errors import ConfigErrors

from .factory import only_problem


def write(directory: Path, **files: str) -> Path:
    """Write YAML files and return the path of `main`."""
    for name, text in files.items():
        path = directory / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory / "main.yaml"


def test_a_file_overrides_what_it_includes(tmp_path: Path) -> None:
    main = write(tmp_path / "a", main="defaults:\n  - ../b/base@_here_\nseed: 7\n")
    write(tmp_path / "b", base="seed: 1\nmax_steps: 30\nunused_variable: ${nothing_of_this_name}\nexp_name: base\n")
    resolved = load_config(main, ["exp_name=own"])
    assert (resolved.config.seed, resolved.config.max_steps, resolved.config.exp_name) == (7, 30, "own")
    assert resolved.provenance["max_steps"] == "base.yaml:2"


def test_self_says_where_the_file_itself_stands(tmp_path: Path) -> None:
    main = write(tmp_path, main="defaults: [_self_, base]\nseed: 7\n", base="seed: 1\n")
    assert load_config(main).config.seed == 1


def test_a_package_puts_a_file_below_a_key(tmp_path: Path) -> None:
    text = "defaults:\n  - sampling@actor_infer.generating_args\n  - actor_train: small\n"
    main = write(
        tmp_path, main=text, sampling="temperature: 0.5\n", actor_train__small="training_args: {learning_rate: 1e-3}\n"
    )
    config = load_config(main).config
    assert config.actor_infer.generating_args.temperature == 0.5
    assert config.actor_train.training_args.learning_rate == 1e-3


def test_files_are_found_on_the_search_path(tmp_path: Path) -> None:
    main = write(tmp_path, main="defaults: [base]\nhydra: {searchpath: ['file://more']}\n", more__base="seed: 5\n")
    assert load_config(main).config.seed == 5


@pytest.mark.parametrize(
    "listed", ["ppo_trainer", "actor@actor_rollout_ref.actor: dp_actor", "critic@critic: dp_critic"]
)
def test_files_that_come_with_verl_stand_for_its_defaults(tmp_path: Path, listed: str) -> None:
    own = "data: {train_files: d.parquet}\nactor_rollout_ref: {model: {path: m}, actor: {optim: {lr: 2e-6}}}\n"
    resolved = load_config(write(tmp_path, main=f"defaults:\n  - {listed}\n  - _self_\n{own}"))
    assert resolved.config.actor_train.training_args.learning_rate == 2e-6
    assert resolved.provenance["lambd"] == "default of verl"


def test_variables_of_an_included_file_that_nobody_uses_are_fine(tmp_path: Path) -> None:
    main = write(
        tmp_path,
        main="defaults: [base@_here_]\ncustom_envs: {Lake: '${worlds.Lake}'}\ntrain_env_manager: {tags: [Lake]}\n",
        base="limit: 5\npattern: <a>\nother: {x: '${no_such}'}\n"
        "worlds:\n  Lake: {env_type: frozen_lake, max_steps: '${limit}'}\n",
    )
    lake = load_config(main).config.custom_envs["Lake"]
    assert (lake.env_type, lake.max_steps) == ("frozen_lake", 5)


def test_a_missing_file_and_a_circle_are_refused_in_one_line(tmp_path: Path) -> None:
    assert "no such file" in only_problem(write(tmp_path / "1", main="defaults: [nowhere]\n"))
    main = write(tmp_path / "2", main="defaults: [other]\n", other="defaults: [main]\n")
    assert "include each other" in only_problem(main)


@pytest.mark.parametrize(
    "text",
    ["2024_11_15", "010", "1:30", "1.10", "1e-6_lr", "5e3run", "2024-11-15", "yes", "off", "1_000", "0x1F", "1e-6"],
)
def test_text_stays_as_it_was_written(text: str, tmp_path: Path) -> None:
    assert load_config(None, [f"exp_name={text}"]).config.exp_name == text
    assert load_config(write(tmp_path, main=f"exp_name: {text}\n")).config.exp_name == text


def test_numbers_and_switches_are_still_read_from_text() -> None:
    config = load_config(None, ["seed=010", "actor_train.training_args.learning_rate=1e-4"]).config
    assert config.seed == 10 and config.actor_train.training_args.learning_rate == 1e-4
    assert type(config.seed) is int and type(config.actor_train.training_args.learning_rate) is float
    assert not load_config(None, ["with_reward=off"]).config.with_reward


def test_values_that_reach_user_code_are_plain_numbers() -> None:
    config = load_config(None, ["custom_envs={Lake: {env_type: frozen_lake, env_config: {size: 4, p: [0.5]}}}"]).config
    options = config.custom_envs["Lake"].env_config
    assert type(options["size"]) is int and type(options["p"][0]) is float


@pytest.mark.parametrize("value", ["1e-6x", "\x00", "\x1b[31m", "{", "[1, "])
def test_a_bad_value_is_one_line_and_never_a_traceback(value: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        load_config(None, [f"actor_train.training_args.learning_rate={value}"])
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_with_control_characters_is_refused(tmp_path: Path) -> None:
    for number, text in enumerate(("seed: \x001\n", "exp_name: \x1b[31mred\n")):
        assert "not valid YAML" in only_problem(write(tmp_path / str(number), main=text))


def test_too_large_files_and_alias_bombs_are_refused(tmp_path: Path) -> None:
    many = write(tmp_path / "many", main="".join(f"k{n}: {n}\n" for n in range(100_000)))
    assert "at most 262,144 are read" in only_problem(many)
    less = write(tmp_path / "less", main="".join(f"k{n}: {n}\n" for n in range(15_000)))
    assert "more than 10,000 values" in only_problem(less)
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    assert "more than 10,000 values" in only_problem(write(tmp_path / "bomb", main=bomb))


def test_long_values_are_cut_in_messages() -> None:
    message = only_problem({"max_steps": "x" * 100_000})
    assert len(message) < 400 and "100,002 characters" in message
