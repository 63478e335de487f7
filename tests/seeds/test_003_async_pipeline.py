"""The async-RL pipeline of verl's fork: eight state machines, weights in three phases, parallelism at any grain."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway.config import StageConfig, load_config
from headway.config.simulation_config import (
    DistributionConfig,
    FaultConfig,
    SimulatedScorerConfig,
    SimulatedTrainerConfig,
    SimulatedWeightsConfig,
)
from headway.flow import stages
from headway.flow.stage import Stage, StageState, create_role_state_machine, register_stage
from headway.flow.training_flow import ROLES, AsyncTrainingFlow
from headway.monitor.event_log import LoggedEvent
from headway.monitor.run_report import make_run_report
from headway.registry import STAGES
from headway.types import SampleGroup
from tests.config.factory import CONFIGS
from tests.flow.factory import Scripted, audit, make_costs, make_engine_cost, make_scenario, own_stages, play_through
from tests.seeds.factory import LONG_TAIL, duration_s, lags, play, starts_inside, step_windows

LINES = (CONFIGS / "async_pipeline.txt").read_text(encoding="utf-8")
ORDER = ("dataloader", "generate", "rollout", "logp", "ref_logp", "reward", "train", "param_update")
SLOW_WEIGHTS = SimulatedWeightsConfig(buckets=4, gather_s=0.2, send_s=0.4, load_s=0.2)


# -- Architecture Principles


def test_architecture_the_four_roles_have_devices_of_their_own_where_asked() -> None:
    derived = load_config(None, ["use_nodes_ratios=[0.25,0.25,0.25,0.25]", "num_gpus_per_node=8"]).derived
    devices = [set(derived.devices[role]) for role in ("actor_train", "logp", "reference", "actor_infer")]
    assert sum(map(len, devices)) == len(set.union(*devices)) == 8


# -- 1. State Machine Design


def test_state_machines_the_stages_stand_in_the_order_of_the_document(tmp_path: Path) -> None:
    assert tuple(ROLES) == ORDER
    assert [role for role in play(tmp_path, max_steps=1).flow.stages if role in ORDER] == list(ORDER)


def test_state_machines_every_class_of_the_document_has_its_stage() -> None:
    table = stages.__doc__ or ""
    for name in ("Dataloader", "Generate", "Rollout", "LogP", "RefLogP", "Reward", "Train", "ParamUpdate"):
        assert f"`{name}StateMachine`" in table
    for role in ORDER:
        assert STAGES.get(role).__name__ in table


def test_state_machines_every_transition_is_a_legal_one_and_is_reported(tmp_path: Path) -> None:
    played = play(tmp_path, async_generation_ratio=1)
    for role in ORDER:
        states = [(event.data["old"], event.data["new"]) for event in played.of("state", who=role)]
        assert states, role
        assert all(before[1] == after[0] for before, after in pairwise(states)), role
        assert states[-1][1] == StageState.STOPPED


def test_state_machines_an_error_stays_in_its_stage(tmp_path: Path) -> None:
    worlds = Scripted({1: [RuntimeError("broken")] * 9})
    played = play_through(make_scenario(async_generation_ratio=1, max_steps=4), tmp_path, prepare=worlds.use)
    assert played.summary.finished and {event.data["group"] for event in played.of("group.drop")} == {1}
    audit(tmp_path)


# -- 2. Asynchronous Parameter Synchronization


def test_weights_are_gathered_sent_and_loaded_in_phases(tmp_path: Path) -> None:
    played = play(tmp_path, costs=make_costs(weights=SLOW_WEIGHTS), async_generation_ratio=1)
    names = {event.data["name"].split()[0] for event in played.of("span.begin", who="param_update")}
    assert "gather" in names and len(names) >= 2


def test_weights_travel_while_generation_and_training_go_on(tmp_path: Path) -> None:
    costs = make_costs(weights=SLOW_WEIGHTS, response_tokens=LONG_TAIL)
    played = play(tmp_path, costs=costs, async_generation_ratio=3, max_steps=12)
    begins = {event.data["span"]: event.time_s for event in played.of("span.begin", who="param_update")}
    spans = [(begins[event.data["span"]], event.time_s) for event in played.of("span.end", who="param_update")]
    assert any(begin < end_s < end for begin, end in step_windows(played) for _, end_s in spans)
    assert any(begin < event.time_s < end for begin, end in spans for event in played.of("request.end"))


def test_weights_without_a_dual_buffer_pause_the_engine_and_nothing_is_lost(tmp_path: Path) -> None:
    costs = make_costs(weights=SLOW_WEIGHTS, response_tokens=LONG_TAIL)
    settings = {"costs": costs, "async_generation_ratio": 1, "max_steps": 6}
    seconds = [duration_s(play(tmp_path / str(on), enable_dual_buffer=on, **settings)) for on in (True, False)]
    assert seconds[0] < seconds[1]
    assert audit(tmp_path / "False")["trained"] == 24


# -- 3. Arbitrary Granularity Parallelism


def test_granularity_fast_generation_goes_n_rounds_ahead_and_no_further(tmp_path: Path) -> None:
    costs = make_costs(trainer=SimulatedTrainerConfig(fixed_s=10.0, save_s=0.1, restart_s=2.0))
    for ahead in (1, 2, 3):
        played = play(tmp_path / str(ahead), costs=costs, engines=4, async_generation_ratio=ahead)
        begin, end = step_windows(played)[0]
        finished = [event for event in played.of("sample.finish") if event.time_s < end]
        assert len(finished) == 4 * (1 + ahead) and begin < end
        assert max(lags(played)) <= ahead


def test_granularity_a_long_answer_does_not_block_training(tmp_path: Path) -> None:
    worlds = Scripted({5: [2000]})
    settings = {"async_generation_ratio": 3, "groups_per_step": 2, "max_steps": 8}
    played = play_through(make_scenario(engines=2, **settings), tmp_path, prepare=worlds.use)
    start = next(e.time_s for e in played.of("group.start") if e.data["position"] == 5)
    assert sum(start < event.time_s < start + 15 for event in played.of("step.end")) >= 2
    assert played.summary.finished and max(lags(played)) <= 3


def test_granularity_performance_rises_by_half_and_more(tmp_path: Path) -> None:
    costs = make_costs(
        response_tokens=DistributionConfig(kind="lognormal", mean=100, std=60, min=1, max=400),
        engine=make_engine_cost(slots=8),
        trainer=SimulatedTrainerConfig(fixed_s=2.0, save_s=0.1, restart_s=2.0),
    )
    seconds = [
        duration_s(play(tmp_path / str(a), costs=costs, groups_per_step=8, async_generation_ratio=a)) for a in (0, 2)
    ]
    assert seconds[0] > 1.5 * seconds[1]


def test_granularity_throughput_grows_nearly_linearly_with_devices(tmp_path: Path) -> None:
    """The document says 0.9; here twice the trainers, engines and groups."""
    rates = []
    for scale in (2, 4):
        costs = make_costs(
            response_tokens=DistributionConfig(kind="lognormal", mean=100, std=30, min=1, max=300),
            engine=make_engine_cost(slots=4),
            trainer=SimulatedTrainerConfig(gpu_s_per_token=0.004),
        )
        world = {"train_devices": tuple(range(scale))}
        settings = {"groups_per_step": 4 * scale, "async_generation_ratio": 2, "max_steps": 14, "world": world}
        played = play(tmp_path / str(scale), costs=costs, engines=2 * scale, **settings)
        steps = played.of("step.end")[3:-3]
        tokens = sum(event.data["actions"] for event in steps[1:])
        rates.append(tokens / (steps[-1].time_s - steps[0].time_s))
    assert rates[1] > 0.9 * 2 * rates[0]


# -- Pipeline Components


def test_components_generation_is_interruptible_and_goes_on_where_it_was(tmp_path: Path) -> None:
    pause = {"eval_steps": 1, "val_batch_size": 2, "pause_generation_for_validation": True}
    played = play(tmp_path, tail=True, async_generation_ratio=1, max_steps=6, **pause)
    lengths = {event.data["sample"]: event.data["actions"] for event in played.of("sample.finish")}
    interrupted = {event.data["request"] for event in played.of("request.end", finish="aborted")}
    whole = [request for request in interrupted if request.split("/")[0] in lengths]
    assert whole
    for request in whole:
        parts = [event.data["actions"] for event in played.of("request.end", request=request)]
        assert len(parts) > 1 and sum(parts) == lengths[request.split("/")[0]]


# -- Configuration


def test_configuration_the_lines_of_the_document_are_one_step_off_on_halves_of_a_node() -> None:
    resolved = load_config(None, [LINES, "trainer.n_gpus_per_node=8"])
    derived = resolved.derived
    assert (derived.async_generation_ratio, derived.bound, derived.hybrid_engine) == (1, 1, False)
    assert derived.devices["actor_train"] == derived.devices["logp"] == derived.devices["reference"] == (0, 1, 2, 3)
    assert derived.devices["actor_infer"] == (4, 5, 6, 7)
    assert resolved.config.enable_dual_buffer


@pytest.mark.parametrize(("steps", "alpha"), [(1, 0), (2, 1), (3, 2), (5, 4)])
def test_configuration_generate_ahead_steps_counts_the_step_that_is_trained(steps: int, alpha: int) -> None:
    line = f"trainer.generate_ahead_steps={steps}"
    assert load_config(None, ["actor_rollout_ref.async_pipeline=True", line]).derived.bound == alpha


def test_configuration_the_sizes_of_buckets_are_those_of_sender_and_receiver() -> None:
    config = load_config(None, [LINES, "trainer.n_gpus_per_node=8"]).config
    assert (config.param_update_produce_bucket_mb, config.param_update_consume_bucket_mb) == (512, 128)


# -- Usage


@pytest.mark.parametrize("use_async_rl", [False, True])
def test_usage_a_flow_and_its_state_machines_are_made_as_the_document_makes_them(
    use_async_rl: bool, tmp_path: Path
) -> None:
    made: list[Stage[Any, Any]] = []

    def add(flow: AsyncTrainingFlow) -> None:
        def make(event: LoggedEvent) -> None:
            if flow.pipeline is not None and not made:
                made.append(
                    create_role_state_machine(role_name="train", pipeline=flow.pipeline, use_async_rl=use_async_rl)
                )

        flow.events.attach(make)

    scenario = make_scenario(async_generation_ratio=1 if use_async_rl else 0, max_steps=2)
    played = play_through(scenario, tmp_path, prepare=add)
    assert played.summary.finished and type(made[0]) is STAGES.get("train")
    assert max(lags(played)) == int(use_async_rl)


def test_usage_a_state_machine_of_ones_own_is_inserted_into_the_flow(tmp_path: Path) -> None:
    with own_stages():

        @register_stage("halved")
        class Halved(Stage[SampleGroup, SampleGroup]):
            consumes = produces = SampleGroup

            async def process(self, item: SampleGroup) -> SampleGroup:
                return item

        world = {"stages": (StageConfig(name="halved", after="reward"),)}
        played = play_through(make_scenario(max_steps=2, world=world), tmp_path)
    order = list(played.flow.stages)
    assert played.summary.finished and played.of("state", who="halved")
    assert order.index("halved") == order.index("reward") + 1


# -- Future Enhancements, all of which exist


def test_future_1_validation_runs_beside_training_on_a_stream_of_its_own(tmp_path: Path) -> None:
    played = play(tmp_path, async_generation_ratio=1, eval_steps=2, val_batch_size=4)
    assert [event.data["trained"] for event in played.of("validate.end")] == [2, 4, 6, 8]
    assert all(event.who == "validate" for event in played.of("sample.start") if event.data["sample"][0] == "v")


def test_future_2_a_critic_is_a_stage_like_the_others(tmp_path: Path) -> None:
    costs = make_costs(critic=SimulatedScorerConfig(fixed_s=0.1))
    played = play(tmp_path, costs=costs, async_generation_ratio=1)
    assert played.summary.finished and played.of("state", who="critic")


def test_future_3_log_probabilities_are_computed_beside_generation(tmp_path: Path) -> None:
    costs = make_costs(ref_logp=SimulatedScorerConfig(fixed_s=0.1))
    seconds = [duration_s(play(tmp_path / str(a), costs=costs, async_generation_ratio=a)) for a in (0, 2)]
    assert seconds[1] < 0.75 * seconds[0]


def test_future_4_how_far_served_is_behind_trained_is_measured(tmp_path: Path) -> None:
    costs = make_costs(weights=SimulatedWeightsConfig(buckets=4, send_s=1.5))
    report = make_run_report(play(tmp_path, costs=costs, async_generation_ratio=2).events)
    assert report.lag.behind_max >= 1 and report.lag.behind_mean > 0
    assert report.lag.max <= 2 and report.lag.samples == 32


# -- Technical Details


def test_details_roles_that_share_devices_take_turns_under_a_lock(tmp_path: Path) -> None:
    played = play(tmp_path, hybrid_engine=True)
    assert [starts_inside(played, f"request.{what}", step_windows(played)) for what in ("start", "end")] == [0, 0]


def test_details_the_run_goes_on_when_a_component_fails(tmp_path: Path) -> None:
    fault = FaultConfig(kind="crash", target="engine/0", at_s=2.5)
    scenario = make_scenario(fault, engines=2, async_generation_ratio=1, groups_per_step=4, max_steps=8)
    played = play_through(scenario, tmp_path)
    assert played.summary.finished and played.of("restart") and played.of("up")
    assert audit(tmp_path)["trained"] == 32


def test_details_repeated_failure_degrades_to_synchronous_training(tmp_path: Path) -> None:
    fault = FaultConfig(kind="lost_message", target="trainer", at_s=2.5, for_s=10.0)
    played = play_through(make_scenario(fault, async_generation_ratio=2, max_steps=60), tmp_path)
    assert played.first("degrade").data["level"] == "synchronous" and played.of("restore")
    down, up = played.first("degrade").time_s, played.first("restore").time_s
    trained = [event for event in played.of("group.train") if down + 10 < event.time_s < up]
    assert {event.data["trained"] - event.data["oldest"] for event in trained} == {0}
