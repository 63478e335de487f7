"""Stages of the user's own, between any two of ours."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from headway.config import StageConfig
from headway.config.simulation_config import DistributionConfig, SimulatedScorerConfig
from headway.errors import ConfigError, PluginError
from headway.flow import stage as stage_module
from headway.flow.pipeline import Pipeline
from headway.flow.stage import Stage, register_stage
from headway.flow.staleness_policies import DropPolicy
from headway.flow.training_flow import ROLES, AsyncTrainingFlow, order_stages
from headway.registry import STAGES, STALENESS_POLICIES
from headway.types import DropReason, SampleGroup, Task
from tests.flow.factory import audit, make_costs, make_scenario, own_stages, play_through

WITH_CRITIC = (*ROLES[:6], "critic", *ROLES[6:])


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with own_stages():
        yield


def register_pass_through(role: str, item_type: type[Any], seen: list[Any]) -> None:
    @register_stage(role)
    class PassThrough(Stage[Any, Any]):
        consumes = produces = item_type

        async def process(self, item: Any) -> Any:
            seen.append(item)
            return item


@pytest.mark.parametrize(("left", "right"), [*pairwise(WITH_CRITIC)])
def test_a_stage_fits_between_any_two_neighbours(left: str, right: str, tmp_path: Path) -> None:
    seen: list[Any] = []
    register_pass_through("mine", STAGES.get(left).produces, seen)
    costs = make_costs(critic=SimulatedScorerConfig(fixed_s=0.1))
    scenario = make_scenario(
        costs=costs, async_generation_ratio=1, world={"stages": (StageConfig(name="mine", after=left),)}
    )
    played = play_through(scenario, tmp_path)
    assert played.summary.finished and seen
    roles = list(played.flow.stages)
    assert roles[roles.index(left) + 1 : roles.index(right)] == ["mine"]
    assert all(isinstance(item, STAGES.get(right).consumes) for item in seen)
    assert any(event.kind == "state" and event.who == "mine" for event in played.events)


def test_several_stand_in_a_row_in_the_order_they_name_each_other(tmp_path: Path) -> None:
    order: list[tuple[int, str]] = []
    for role in ("first", "second"):

        @register_stage(role)
        class Mine(Stage[SampleGroup, SampleGroup]):
            consumes = produces = SampleGroup

            async def process(self, item: SampleGroup) -> SampleGroup:
                order.append((item.group_id, self.role))
                return item

    stages = (StageConfig(name="first", after="rollout"), StageConfig(name="second", after="first"))
    assert play_through(make_scenario(max_steps=1, world={"stages": stages}), tmp_path).summary.finished
    assert [role for group, role in order if group == 0] == ["first", "second"]


def example() -> tuple[str, tuple[StageConfig, ...]]:
    """The class and the `stages` of the example in the stage module, as they are written there."""
    text = inspect.getdoc(stage_module) or ""
    block = dedent(text[text.index("    @register_stage") : text.index("Every change of state")])
    source, configuration = block.split("stages: ")
    stages = yaml.safe_load(configuration)
    return source, tuple(StageConfig(**stage) for stage in stages)


def test_the_example_of_the_documentation_works_as_it_is_written(tmp_path: Path) -> None:
    source, stages = example()
    assert len(source.strip().splitlines()) <= 14
    names = {"Stage": Stage, "register_stage": register_stage, "SampleGroup": SampleGroup, "DropReason": DropReason}
    exec(source, {**names, "Pipeline": Pipeline})
    costs = make_costs(response_tokens=DistributionConfig(kind="lognormal", mean=350, std=200, min=1, max=500))
    scenario = make_scenario(
        costs=costs, async_generation_ratio=1, group_size=12, max_steps=6, world={"stages": stages}
    )
    played = play_through(scenario, tmp_path)
    assert played.summary.finished
    drops = played.of("group.drop", reason=DropReason.FILTERED)
    assert drops and {event.who for event in drops} == {"short_only"}
    assert max(event.data["actions"] for event in played.of("group.train")) <= 4096
    assert audit(tmp_path)["dropped:filtered"] == 12 * len(drops)
    positions = [event.data["position"] for event in played.of("group.start")]
    assert len(set(positions)) == len(positions), "what the user's stage let go is not drawn again"


def test_a_stage_that_breaks_ends_the_run_with_its_error_and_everything_saved(tmp_path: Path) -> None:
    @register_stage("broken")
    class Broken(Stage[SampleGroup, SampleGroup]):
        consumes = produces = SampleGroup

        async def process(self, item: SampleGroup) -> SampleGroup:
            if item.group_id == 3:
                raise ZeroDivisionError("the user's own bug")
            return item

    scenario = make_scenario(max_steps=9, world={"stages": (StageConfig(name="broken", after="reward"),)})
    flows: list[AsyncTrainingFlow] = []
    said = r"the stage 'broken' raised ZeroDivisionError: the user's own bug at .*test_own_stage.py:\d+"
    with pytest.raises(PluginError, match=said):
        play_through(scenario, tmp_path, prepare=flows.append)
    assert str(flows[0].stages["broken"].state) == "failed"
    counts = audit(tmp_path)
    assert (counts["trained"], counts["saved"], counts["open"]) == (2, 2, 0)


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_stage_that_leaves_is_not_taken_for_the_user(tmp_path: Path, raised: BaseException, width: int) -> None:
    @register_stage("leaving")
    class Leaving(Stage[SampleGroup, SampleGroup]):
        consumes = produces = SampleGroup

        async def process(self, item: SampleGroup) -> SampleGroup:
            raise raised

    Leaving.width = width
    stages = (StageConfig(name="leaving", after="reward"),)
    with pytest.raises(PluginError, match=f"the stage 'leaving' raised {type(raised).__name__}"):
        play_through(make_scenario(max_steps=2, world={"stages": stages}), tmp_path)
    assert audit(tmp_path)["open"] == 0


def test_a_policy_that_leaves_is_not_taken_for_the_user(tmp_path: Path) -> None:
    class LeavingPolicy(DropPolicy):
        def select(self, groups: Any, snapshot: Any) -> Any:
            raise SystemExit

    with STALENESS_POLICIES.isolate():
        STALENESS_POLICIES.register("leaving", LeavingPolicy)
        said = r"the staleness policy 'leaving' raised SystemExit at .*test_own_stage.py:\d+"
        with pytest.raises(PluginError, match=said):
            play_through(make_scenario(max_steps=2, staleness_policy="leaving"), tmp_path)
    assert audit(tmp_path)["open"] == 0


@pytest.mark.parametrize(
    ("name", "after", "problem"),
    [
        ("mine", "rollout", "mine consumes Task, but rollout produces SampleGroup"),
        ("mine", "generate", "mine consumes Task, but generate produces EpisodeGroup"),
        ("mine", "rollouts", "'mine' cannot stand behind it"),
        ("mine", "param_update", "'mine' cannot stand behind it"),
        ("mine", "critic", "'mine' cannot stand behind it"),
        ("nobody", "rollout", "no such stage is registered"),
    ],
)
def test_a_stage_that_does_not_fit_is_refused_before_anything_starts(name: str, after: str, problem: str) -> None:
    register_pass_through("mine", Task, [])
    with pytest.raises(ConfigError, match=problem):
        order_stages([StageConfig(name=name, after=after)], critic=False)


def test_arguments_that_a_stage_does_not_take_are_refused_before_anything_starts() -> None:
    @register_stage("mine")
    class Mine(Stage[SampleGroup, SampleGroup]):
        consumes = produces = SampleGroup

        def __init__(self, pipeline: Pipeline, *, most: int = 3) -> None:
            super().__init__(pipeline)

    assert "mine" in order_stages([StageConfig(name="mine", args={"most": 4})], critic=False)
    with pytest.raises(ConfigError, match="arguments of mine: most"):
        order_stages([StageConfig(name="mine", args={"least": 4})], critic=False)


def test_without_own_stages_the_pipeline_is_the_one_of_the_design() -> None:
    assert order_stages((), critic=False) == list(ROLES)
    assert order_stages((), critic=True) == list(WITH_CRITIC)
