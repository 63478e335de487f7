"""The public interface: what `import headway` offers.

Functions do what the commands of the same name do, and return results instead of exit codes. A configuration is a YAML
file, the directory of a run or a mapping, with overrides on top: `headway.train("run.yaml", {"max_steps": 40})`.

Decorators register code of your own under a name. A name that a plugin registers (`plugins: [my_module.py]`, or the
entry point group `headway.plugins`) is valid everywhere a built-in name is, in every process of a run.

Nothing here imports torch before a run needs it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from headway.algorithm_traits import AdvantageTraits, LossTraits, register_advantage_estimator, register_policy_loss
from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.registry import ENGINES, ENVIRONMENTS, REWARDS, STAGES, STALENESS_POLICIES, Registry
from headway.user_code import stop_imported_script

if TYPE_CHECKING:
    from headway.cli.simulate_command import SimulatedRun
    from headway.flow.backends import RunContext
    from headway.flow.stage import Stage
    from headway.flow.training_flow import RunSummary
    from headway.rollout.sample_evaluation import EvaluatedSample
    from headway.sim.planner import GpuSplitPlan

__all__ = [
    "evaluate", "load_config", "open_run", "plan", "register_advantage", "register_engine", "register_environment",
    "register_loss", "register_policy", "register_reward", "register_stage", "serve", "simulate", "train",
    "train_async",
]  # fmt: skip

Source = str | Mapping[str, Any]
Overrides = Mapping[str, Any] | Iterable[str]
R = TypeVar("R")
T = TypeVar("T", bound=Callable[..., Any])
StageT = TypeVar("StageT", bound="type[Stage[Any, Any]]")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The result of `evaluate`."""

    policy: Path
    """Directory of the policy that answered."""
    domains: Mapping[str, Mapping[str, float | None]]
    """Results by domain: number of `tasks`, of judged `answers` and `failed` ones, mean `reward` of the judged ones or
    None, its `standard_error`, …"""
    samples: Sequence[EvaluatedSample]
    """Every task with its scored answers, and the reasons why others have no score."""


def load_config(source: Source | None = None, overrides: Overrides = ()) -> ResolvedConfig:
    """Return the complete, checked configuration. Raise `ConfigErrors` with everything that is wrong with it."""
    from headway.cli.command_line import resolve_source

    return resolve_source(source, _format_overrides(overrides))


def train(
    source: Source, overrides: Overrides = (), *, rewards: Mapping[str, Callable[..., Any]] | None = None
) -> RunSummary:
    """Train like `headway train`, with the same display and files. `rewards` are functions by name.

    An interrupt ends the run with a checkpoint; a second one raises `KeyboardInterrupt`. In a notebook, where an event
    loop is running already, use `await headway.train_async(...)`.

    A function of a script is stored by the script's path, so that commands find it again; a script that is imported
    for this stops where it calls `train`.
    """
    stop_imported_script()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError("an event loop runs already, as in a notebook: await headway.train_async(...)")
    try:
        return asyncio.run(train_async(source, overrides, rewards=rewards))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def train_async(
    source: Source, overrides: Overrides = (), *, rewards: Mapping[str, Callable[..., Any]] | None = None
) -> RunSummary:
    """Train like `train`, inside a running event loop."""
    stop_imported_script()
    from headway.cli.command_line import make_console
    from headway.cli.train_command import (
        add_rewards,
        print_conclusion,
        print_finished,
        print_introduction,
        train_with_display,
    )
    from headway.flow.training_flow import RunSummary
    from headway.launch.training_session import open_run_directory, prepare_run

    named = _format_overrides(_name_rewards(rewards or {}))
    resolved = load_config(source, [*_format_overrides(overrides), *named])
    console, prepared = make_console(), prepare_run(resolved)
    with open_run_directory(prepared) as directory:
        done = directory.count_trained_steps()
        if done >= prepared.resolved.config.max_steps:
            directory.save_open_samples()
            print_finished(directory.path, done, console)
            return add_rewards(RunSummary(trained=done, finished=True), directory.path)
        print_introduction(prepared, done, console, directory.changes)
        summary = await train_with_display(prepared, directory, console)
    print_conclusion(prepared, summary, console)
    return add_rewards(summary, prepared.directory)


@asynccontextmanager
async def open_run(source: Source, overrides: Overrides = ()) -> AsyncIterator[RunContext]:
    """Start the back ends of a configuration, for an `AsyncTrainingFlow` of your own:

        async with headway.open_run("run.yaml") as trainer:
            flow = AsyncTrainingFlow(trainer=trainer, enable_async_rl=True)
            summary = await flow.run()

    The end of the block stops every process that was started.
    """
    from headway.launch.training_session import open_run_context, open_run_directory, prepare_run

    prepared = prepare_run(load_config(source, overrides))
    with open_run_directory(prepared) as directory:
        async with open_run_context(prepared, directory) as context:
            yield context


def evaluate(
    source: Source, overrides: Overrides = (), *, answers: int = 1, limit: int | None = None
) -> EvaluationReport:
    """Evaluate like `headway eval`: the newest checkpoint of a run directory, or the model of a configuration.

    Each held-out task, at most `limit` of them, gets `answers` answers.
    """
    from headway.cli.eval_command import summarize_answers
    from headway.launch.inference_session import evaluate_policy, select_evaluation_tasks
    from headway.launch.training_session import prepare_run

    prepared = prepare_run(load_config(source, [*_format_overrides(overrides), *_find_policy(source, overrides)]))
    tasks = select_evaluation_tasks(prepared, limit)
    samples = _call_beside_loop(lambda: asyncio.run(evaluate_policy(prepared, tasks, answers=answers)))
    return EvaluationReport(policy=prepared.policy.path, domains=summarize_answers(samples), samples=samples)


def simulate(
    source: Source, overrides: Overrides = (), *, steps: int | None = None, seed: int | None = None
) -> SimulatedRun:
    """Run a configuration on the virtual clock like `headway simulate`, without writing files."""
    from headway.cli.simulate_command import simulate_run

    more = [f"simulation.steps={steps}"] if steps is not None else []
    more += [f"seed={seed}"] if seed is not None else []
    resolved = load_config(source, [*_format_overrides(overrides), *more])
    return _call_beside_loop(lambda: simulate_run(resolved))


def plan(
    source: Source, overrides: Overrides = (), *, gpus: int, alphas: Sequence[float] = (0.0, 1.0, 2.0, 4.0)
) -> GpuSplitPlan:
    """Rank the ways to use `gpus` GPUs like `headway plan`."""
    from headway.sim.planner import plan_gpu_split
    from headway.sim.simulated_run import make_scenario
    from headway.sim.split_check import count_gpus_per_trainer_copy, make_split_check

    resolved = load_config(source, overrides)
    search = partial(
        plan_gpu_split,
        make_scenario(resolved),
        gpus=gpus,
        alphas=alphas,
        trainer_gpus=count_gpus_per_trainer_copy(resolved),
        check=make_split_check(resolved),
    )
    return _call_beside_loop(search)


@asynccontextmanager
async def serve(
    model: str, overrides: Overrides = (), *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
) -> AsyncIterator[str]:
    """Serve a model or a run directory like `headway serve`; the block gets the address, such as `http://…:8000/v1`."""
    from headway.cli.serve_command import find_model
    from headway.launch.inference_session import open_completion_server, prepare_serving

    prepared = prepare_serving(find_model(model), _format_overrides(overrides))
    name = Path(model).name or prepared.context.policy.path.name
    async with open_completion_server(prepared, name, host=host, port=port, token=token) as address:
        yield f"{address}/v1"


# -- decorators


def register_stage(name: str) -> Callable[[StageT], StageT]:
    """Make a `headway.flow.stage.Stage` usable in `stages: [{name: …, after: rollout}]`.

    The class says what it takes and gives: `consumes = produces = SampleGroup` between `rollout` and `train`.
    """
    from headway.flow.stage import Stage

    def register(stage: StageT) -> StageT:
        if not (isinstance(stage, type) and issubclass(stage, Stage)):
            _refuse(STAGES, name, "is not a subclass of headway.flow.stage.Stage", "class MyStage(Stage): …")
        if not (hasattr(stage, "consumes") and hasattr(stage, "produces")):
            _refuse(STAGES, name, "does not say what it takes and gives", "consumes = produces = SampleGroup")
        STAGES.register(name, stage)
        stage.role = name
        return stage

    return register


def register_loss(
    name: str,
    *,
    corrects_off_policy: bool = False,
    needs_proximal: bool = False,
    needs_whole_sequences: bool = False,
    skips_zero_advantages: bool = False,
    default_clip: tuple[float, float] | None = None,
) -> Callable[[T], T]:
    """Make a function `(actions, settings) -> loss per action` a value of `pg_variant`.

    `headway.algorithms.losses` describes the arguments, and docs/algorithms.md the traits. Say
    `corrects_off_policy=True` if the loss uses the ratio to the behaviour policy: α > 0 is refused for losses that do
    not.
    """

    def register(function: T) -> T:
        traits = LossTraits(
            corrects_off_policy=corrects_off_policy,
            needs_proximal=needs_proximal,
            needs_whole_sequences=needs_whole_sequences,
            skips_zero_advantages=skips_zero_advantages,
            default_clip=default_clip,
        )
        register_policy_loss(name, function, traits)
        return function

    return register


def register_advantage(
    name: str,
    *,
    default_norm: Literal["group", "batch", "none"] = "none",
    compares_group_members: bool = False,
    needs_several_members: bool = False,
    needs_critic: bool = False,
    reads_turns: bool = False,
) -> Callable[[T], T]:
    """Make a function `(inputs) -> advantage per action` a value of `adv_estimator`.

    `headway.algorithms.advantages` describes `inputs`, and docs/algorithms.md the traits.
    """

    def register(function: T) -> T:
        traits = AdvantageTraits(
            default_norm=default_norm,
            compares_group_members=compares_group_members,
            needs_several_members=needs_several_members,
            needs_critic=needs_critic,
            reads_turns=reads_turns,
        )
        register_advantage_estimator(name, function, traits)
        return function

    return register


def register_reward(name: str) -> Callable[[T], T]:
    """Make a function `(text, task_data, **reward_args) -> float`, or a class with `score`, a value of `reward_fn`."""
    return lambda function: REWARDS.register(name, function)


def register_environment(name: str) -> Callable[[T], T]:
    """Make a class with `reset` and `step` a value of `custom_envs.*.env_type`; see docs/environments.md."""

    def register(factory: T) -> T:
        if isinstance(factory, type):
            _require_methods(ENVIRONMENTS, name, factory, "reset", "step")
        ENVIRONMENTS.register(name, factory)
        return factory

    return register


def register_engine(name: str) -> Callable[[T], T]:
    """Make a function `(args, name, end) -> Engine` a value of `actor_infer.strategy_args.strategy_name`.

    It is called in the process of the engine, like `headway.launch.language_components.make_native_engine`.
    """
    return lambda factory: ENGINES.register(name, factory)


def register_policy(name: str) -> Callable[[T], T]:
    """Make a class with `admit`, `select` and `evict` a value of `staleness_policy`; see `flow.staleness_policies`."""

    def register(policy: T) -> T:
        _require_methods(STALENESS_POLICIES, name, policy, "admit", "select", "evict")
        STALENESS_POLICIES.register(name, policy)
        return policy

    return register


def _require_methods(registry: Registry[Any], name: str, entry: object, *methods: str) -> None:
    """Raise `ConfigError` if a class that is to be registered lacks a method that a run will call."""
    missing = [method for method in methods if not callable(getattr(entry, method, None))]
    if missing:
        _refuse(registry, name, f"has no {' and no '.join(missing)}", f"a class with {', '.join(methods)}")


def _refuse(registry: Registry[Any], name: str, problem: str, hint: str) -> NoReturn:
    raise ConfigError(problem, key=registry.kind, value=name, hint=hint)


def _call_beside_loop(call: Callable[[], R]) -> R:
    """Call a function that runs an event loop of its own: in a thread where one runs here already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def _find_policy(source: Source, overrides: Overrides) -> list[str]:
    """Return the override that selects the newest checkpoint of a run directory, unless another model is named."""
    from headway.cli.command_line import make_policy_override

    named = any(word.startswith("pretrain=") for word in _format_overrides(overrides))
    return [] if named or not isinstance(source, str) else make_policy_override(source)


def _format_overrides(overrides: Overrides) -> list[str]:
    """Return overrides as they are written on the command line."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()]


def _name_rewards(rewards: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Return the options that name these functions. Raise `ConfigError` for a function that cannot be found again."""
    named = {}
    for name, function in rewards.items():
        module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
        if not callable(function) or module is None or not path or "<" in path:
            problem, value = "has no name that it could be found by again", path or repr(function)
            hint = "a function of a module, or of the script's outermost level"
            raise ConfigError(problem, key=f"rewards.{name}", value=value, hint=hint)
        file = getattr(sys.modules["__main__"], "__file__", None) if module == "__main__" else None
        where = Path(file).resolve() if file else module  # another process, such as `headway eval`, has another main
        named[f"rewards.{name}.reward_fn"] = f"{where}:{path}"
    return named
