"""Plugins: the examples in real runs of a tiny model, in simulated ones, and mistakes that are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

import headway
from headway import user_code
from headway.environments.environment_registry import BUILT_IN_ENVIRONMENTS, find_environment_path
from headway.errors import ConfigError, ConfigErrors
from headway.flow.stage import create_role_state_machine
from headway.flow.training_flow import AsyncTrainingFlow
from headway.monitor.event_files import read_event_log
from headway.registry import (
    ADVANTAGE_ESTIMATORS,
    ENGINES,
    ENVIRONMENTS,
    POLICY_LOSSES,
    REWARDS,
    STAGES,
    STALENESS_POLICIES,
)
from headway.rewards.reward_registry import BUILT_IN_REWARDS
from headway.user_code import import_function, locate_user_code
from tests.runs.factory import Runs, audit, events

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a test registers, and that its plugins were imported."""
    monkeypatch.setattr(user_code, "_IMPORTED_FILES", {})
    everything = (ADVANTAGE_ESTIMATORS, ENGINES, ENVIRONMENTS, POLICY_LOSSES, REWARDS, STAGES, STALENESS_POLICIES)
    with ExitStack() as stack:
        for registry in everything:
            stack.enter_context(registry.isolate())
        yield


def test_the_registries_know_the_names_that_are_built_in() -> None:
    assert set(ENVIRONMENTS.built_in) == set(BUILT_IN_ENVIRONMENTS)
    assert set(REWARDS.built_in) == set(BUILT_IN_REWARDS)


def count_digits(text: str) -> float:
    digits = sum(character.isdigit() for character in text)
    return digits / len(text) if digits else 0.0


@pytest.mark.parametrize("processes", [False, True])
def test_loss_policy_stages_and_reward_work_in_a_real_run(runs: Runs, tmp_path: Path, processes: bool) -> None:
    words = [f"pretrain={runs.model}", f"output_dir={tmp_path / 'run'}", f"processes={str(processes).lower()}"]
    stages = yaml.safe_load((PLUGINS / "single_turn.yaml").read_text())["stages"]
    stages[1]["args"]["most_tokens"] = 31  # 4 answers of 8 tokens have 32: an untaught model rarely ends one early
    words += [f"stages={json.dumps(stages)}", "track_with=[]", "max_steps=2"]
    run = runs.start(tmp_path / "run", "train", str(PLUGINS / "single_turn.yaml"), *words)
    assert run.end() == 0, run.text
    audit(run.directory)
    assert "loss soft_clip" in run.text
    roles = {event.who for event in events(run.directory, "state")}
    assert {"strip_spaces", "short_groups", "length_bonus"} <= roles
    dropped = [event for event in events(run.directory, "group.drop") if event.who == "short_groups"]
    assert dropped and all(event.data["reason"] == "filtered" for event in dropped)
    trained = events(run.directory, "group.train")
    assert max(event.data["actions"] for event in trained) <= 31
    assert max(event.data["trained"] - event.data["oldest"] for event in trained) <= 1
    answers = [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]
    assert all(answer["answer"] == answer["answer"].strip() for answer in answers)
    bonuses = [answer["reward"] - count_digits(answer["answer"]) for answer in answers]
    assert {round(bonus, 6) for bonus in bonuses} == {0.0, 0.1}, "the shortest answers of a group have the bonus"
    saved = yaml.safe_load((run.directory / "config.yaml").read_text())
    assert all(Path(path).is_absolute() and Path(path).is_file() for path in saved["plugins"])


def test_an_environment_works_in_a_real_run_and_in_worker_processes(runs: Runs, tmp_path: Path) -> None:
    words = [f"pretrain={runs.model}", f"output_dir={tmp_path / 'run'}", "track_with=[]", "processes=false"]
    file = str(PLUGINS / "agentic.yaml")
    words += ["rollout_batch_size=4", "train_env_manager.group_size=2", "sequence_length=128", "max_steps=2"]
    run = runs.start(tmp_path / "run", "train", file, *words, "custom_envs.guess.workers=1")
    assert run.end() == 0, run.text
    audit(run.directory)


def test_a_stage_runs_on_the_virtual_clock_from_the_same_key(tmp_path: Path) -> None:
    overrides = {
        "plugins": [str(PLUGINS / "group_stages.py")],
        "stages": [{"name": "short_groups", "after": "rollout", "args": {"most_tokens": 4000}}],
        "simulation.response_tokens": {"kind": "lognormal", "mean": 300, "std": 300, "min": 1, "max": 2000},
    }
    source = {"rollout_batch_size": 4, "num_return_sequences_in_group": 8, "response_length": 2000}
    report = headway.simulate(source, overrides, steps=4)
    assert report.summary.finished
    assert any(event.who == "short_groups" for event in report.events)
    assert max(event.data["actions"] for event in report.events if event.kind == "group.train") <= 4000


def test_a_flow_made_in_python_gets_the_back_ends_of_a_configuration(runs: Runs, tmp_path: Path) -> None:
    """The shape that the async pipeline of verl has."""
    words = runs.words(tmp_path / "run", max_steps=2, processes=False)

    async def main() -> None:
        async with headway.open_run({}, words) as trainer:
            flow = AsyncTrainingFlow(trainer=trainer, enable_async_rl=False)
            seen: list[object] = []

            def remember(event: object) -> None:
                if flow.pipeline is not None and not seen:
                    seen.append(
                        create_role_state_machine(
                            role_name="train", pipeline=flow.pipeline, trainer=trainer, use_async_rl=False
                        )
                    )
                    with pytest.raises(ValueError, match="use_async_rl=True"):
                        create_role_state_machine("train", pipeline=flow.pipeline, use_async_rl=True)

            trainer.events.attach(remember)
            summary = await flow.run()
            assert summary.finished and summary.trained == 2 and seen

    asyncio.run(main())
    trained = [e.data for e in read_event_log(tmp_path / "run") if e.kind == "group.train"]
    lags = [data["trained"] - data["oldest"] for data in trained]
    assert lags and max(lags) == 0


def test_an_engine_of_ones_own_serves_a_run(runs: Runs, tmp_path: Path) -> None:
    plugin = tmp_path / "own_engine.py"
    plugin.write_text(
        "import headway\n"
        "from headway.launch.language_components import make_native_engine\n\n\n"
        "@headway.register_engine('counting')\n"
        "def make(args, name, end=None):\n"
        f"    open({str(tmp_path / 'made')!r}, 'a').write(name + '\\n')\n"
        "    return make_native_engine(args, name, end)\n"
    )
    words = runs.words(tmp_path / "run", max_steps=1, processes=True)
    more = [f"plugins=[{plugin}]", "actor_infer.strategy_args.strategy_name=counting"]
    run = runs.start(tmp_path / "run", "train", *words, *more)
    assert run.end() == 0, run.text
    assert (tmp_path / "made").read_text() == "engine/0\n"


def test_an_estimator_of_ones_own_is_a_value_like_any_other(tmp_path: Path) -> None:
    @headway.register_advantage("centred", compares_group_members=True)
    def centred(inputs: object) -> object:
        return inputs

    assert headway.load_config({"adv_estimator": "centred"}).config.adv_estimator == "centred"
    with pytest.raises(ConfigErrors, match="did you mean centred"):
        headway.load_config({"adv_estimator": "centerd"})


def test_a_loss_that_does_not_correct_is_refused_with_headway() -> None:
    headway.register_loss("plain")(lambda actions, settings: actions.logp_N)
    assert headway.load_config({"pg_variant": "plain"})
    with pytest.raises(ConfigErrors, match="no off-policy correction"):
        headway.load_config({"pg_variant": "plain", "async_generation_ratio": 1})


def test_a_plugin_that_cannot_be_imported_is_refused_with_its_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ZeroDivisionError('a bug of mine')\n")
    with pytest.raises(ConfigErrors, match=r"plugins = .*broken.py.*ZeroDivisionError: a bug of mine"):
        headway.load_config({"plugins": [str(broken)]})
    with pytest.raises(ConfigErrors, match=r"plugins = .*there is no such file"):
        headway.load_config({"plugins": ["nothing.py"]})


def test_built_in_names_cannot_be_taken() -> None:
    with pytest.raises(ConfigError, match="is a built-in policy loss"):
        headway.register_loss("ppo")(lambda actions, settings: None)
    with pytest.raises(ConfigError, match="is a built-in reward"):
        headway.register_reward("math")(lambda text, data: 0.0)


def test_plugins_beside_the_configuration_are_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resolved = headway.load_config(str(PLUGINS / "single_turn.yaml"))
    assert resolved.config.plugins[0] == str(PLUGINS / "soft_clip_loss.py")
    assert resolved.config.pg_variant == "soft_clip" and len(resolved.config.stages) == 3


def test_an_environment_that_was_defined_in_a_function_has_no_import_path() -> None:
    headway.register_environment("local")(lambda: None)
    assert find_environment_path("local") is None and find_environment_path("sokoban") == "sokoban"


def test_what_a_decorator_gets_wrong_is_refused_where_it_stands() -> None:
    from headway.flow.stage import Stage

    with pytest.raises(ConfigError, match=r"'mine': is not a subclass of headway.flow.stage.Stage"):
        headway.register_stage("mine")(lambda group: group)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"does not say what it takes and gives.*consumes = produces = SampleGroup"):
        headway.register_stage("mine")(type("Untyped", (Stage,), {}))
    with pytest.raises(ConfigError, match="has no admit and no evict"):
        headway.register_policy("mine")(type("Half", (), {"select": print}))
    with pytest.raises(ConfigError, match="has no step"):
        headway.register_environment("mine")(type("Half", (), {"reset": print}))
    assert "mine" not in STAGES and "mine" not in STALENESS_POLICIES and "mine" not in ENVIRONMENTS


def test_a_taken_name_is_refused_with_both_places(tmp_path: Path) -> None:
    source = "import headway\n@headway.register_reward('twice')\ndef score(text, row):\n    return 1\n"
    files = [tmp_path / "one.py", tmp_path / "other.py"]
    for file in files:
        file.write_text(source)
    with pytest.raises(ConfigErrors, match=r"another reward in .*one.py \(choose another name in .*other.py\)"):
        headway.load_config({"plugins": [str(file) for file in files]})


def test_a_stage_takes_no_built_in_name_and_stands_in_the_list_once() -> None:
    from headway.flow.stage import Stage
    from headway.types import SampleGroup

    own = type("Own", (Stage,), {"consumes": SampleGroup, "produces": SampleGroup})
    with pytest.raises(ConfigError, match="is a built-in stage"):
        headway.register_stage("reward")(own)
    headway.register_stage("own_stage")(own)
    with pytest.raises(ConfigErrors, match=r"stages\[1\].name = 'own_stage': stands in the list already"):
        headway.load_config({"stages": [{"name": "own_stage"}, {"name": "own_stage", "after": "reward"}]})
    with pytest.raises(ConfigErrors, match="did you mean own_stage"):
        headway.load_config({"stages": [{"name": "own_stagee"}]})


def test_every_trait_of_the_documentation_can_be_given() -> None:
    headway.register_loss("own_loss", skips_zero_advantages=True, default_clip=(0.1, 0.3))(lambda *_: None)
    headway.register_advantage(
        "own_estimator", default_norm="batch", compares_group_members=True, needs_several_members=True
    )(lambda _: None)
    settings = headway.load_config({"pg_variant": "own_loss"}).config
    assert (settings.pg_clip_low, settings.pg_clip_high) == (0.1, 0.3)
    with pytest.raises(ConfigErrors, match="own_estimator"):
        headway.load_config({"adv_estimator": "own_estimator", "num_return_sequences_in_group": 1})


def test_an_estimator_that_needs_several_members_refuses_groups_of_one(tmp_path: Path) -> None:
    plugin = tmp_path / "pairs.py"
    plugin.write_text(
        "import headway\n\n\n@headway.register_advantage('pairs', needs_several_members=True)\n"
        "def pairs(inputs):\n    return inputs.normalised_rewards()[inputs.batch.sequence_N]\n"
    )
    given = {"plugins": [str(plugin)], "adv_estimator": "pairs"}
    problem = r"adv_estimator = 'pairs': needs groups of several members, but the group size is 1.*in_group: 2 or more"
    with pytest.raises(ConfigErrors, match=problem):
        headway.load_config({**given, "num_return_sequences_in_group": 1})
    assert headway.load_config({**given, "num_return_sequences_in_group": 2}).derived.group_size == 2


def test_an_error_in_a_plugin_is_located(tmp_path: Path) -> None:
    file = tmp_path / "raising.py"
    file.write_text("def fail():\n    raise KeyError('x')\n")
    fail = import_function(f"{file}:fail", key="test")
    with pytest.raises(KeyError) as caught:
        fail()
    assert locate_user_code(caught.value) == f" at {file}:2"
    assert locate_user_code(ValueError()) == ""


def test_the_package_shows_what_it_offers() -> None:
    assert headway.api.train is headway.train
    assert {"api", *headway.__all__} <= set(dir(headway))
    assert headway.__doc__ is not None
    assert all(f"`{name}`" in headway.__doc__ for name in headway.__all__ if not name.startswith("_"))
