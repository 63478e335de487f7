"""`headway play`: step through an environment by hand, or watch a policy in it.

    headway play                                                  the environments there are
    headway play frozen_lake is_slippery=false --seed 3           by hand: a line is an action, Ctrl-D ends
    headway play my_worlds.py:Maze size=5 --model MODEL           a model plays it
    headway play runs/mine --episodes 3                           the newest policy of a run, as the run plays

Turns are shown as they happen, one episode after the other. Exit code 1 where an episode failed.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import yaml

from headway.cli.command_line import at_least_one, load_run_config, make_policy_override
from headway.config import load_config
from headway.environments.base import Environment, Observation, find_concurrency_limit
from headway.environments.environment_registry import list_environment_names, make_environment
from headway.environments.local_host import LocalEnvironmentHost
from headway.environments.text_environment import Reply
from headway.environments.text_episode import SEED_KEY
from headway.errors import ConfigError, EnvironmentFailed
from headway.launch.inference_session import evaluate_policy, select_evaluation_tasks
from headway.launch.training_session import PreparedRun, prepare_run
from headway.types import Generation, Task

HELP = "step through an environment by hand or with a policy"
_TAG = "played"
_LONGEST = 2048
"""Longest episode in tokens, if the model can read that many."""
_TURN = 256
"""Longest turn in tokens, unless the environment sets another limit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "name, module:Class, or what a run plays"
    parser.add_argument("environment", nargs="?", metavar="ENV|FILE|RUN", help=what)
    parser.add_argument("arguments", nargs="*", metavar="option=value", help="of the environment, or of the run")
    parser.add_argument("--model", help="let this model play: directory or name")
    parser.add_argument("--seed", type=int, default=0, help="which episode (0)")
    parser.add_argument("--episodes", type=at_least_one, default=1, help="how many, with the next seeds (1)")
    limit = "turns of an episode (what the environment or the run says)"
    parser.add_argument("--max-steps", type=at_least_one, metavar="N", help=limit)


def run_command(args: argparse.Namespace) -> int:
    """Play by hand, or let a policy play where there is one."""
    if args.environment is None:
        print("\n".join(list_environment_names()))
        return 0
    if Path(args.environment).is_dir() or args.environment.endswith((".yaml", ".yml")):
        # what a run plays, with its newest policy or the one that is named
        policy = make_policy_override(args.environment, args.model)
        words = [args.environment, *args.arguments, *policy]
        if args.max_steps:
            tags = load_run_config(words).config.custom_envs
            words += [f"custom_envs.{tag}.max_steps={args.max_steps}" for tag in tags]
        return _watch_policy(prepare_run(load_run_config(words)), args)
    options = _parse_options(args.arguments)
    if args.model is None:
        seeds = range(args.seed, args.seed + args.episodes)
        return max(_play_by_hand(args.environment, options, seed, args.max_steps) for seed in seeds)
    return _watch_policy(_prepare_model_to_watch_policy(args, options), args)


def _parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` into keywords; values are read as in YAML."""
    options = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key.isidentifier():
            raise ConfigError("is no option", key="play", value=word, hint="option=value")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"cannot be read: {error}", key=key, value=value) from error
    return options


def _play_by_hand(name: str, options: dict[str, Any], seed: int, most: int | None) -> int:
    make_environment(name, **options)  # raises ConfigError where the name or an option is wrong
    host = LocalEnvironmentHost(name, lambda: make_environment(name, **options))
    with asyncio.Runner() as runner:
        seat, earned = host.make_slot(), 0.0
        try:
            traits = runner.run(seat.open())
            most = most or traits.max_steps
            if traits.instructions:
                print(traits.instructions, end="\n\n")
            reply = runner.run(seat.reset(seed, {}))
            print(reply.text)
            turns = 0
            while not reply.done:
                if turns == most:
                    print(f"[cut off: an episode has at most {most} turns]")
                    break
                turns += 1
                print("> ", end="", flush=True)
                action = sys.stdin.readline()
                if not action:
                    break
                reply = runner.run(seat.step(action.rstrip("\n")))
                earned += reply.reward
                print(f"{reply.text}\n{_describe_reply(reply)}")
        except Exception as error:  # a failed episode is data, as in a run
            what = str(error) if isinstance(error, EnvironmentFailed) else f"{type(error).__name__}: {error}"
            print(f"the episode failed: {what}", file=sys.stderr)
            return 1
        finally:
            runner.run(seat.leave())
            runner.run(host.close())
    print(f"earned {earned:g}")
    return 0


def _describe_reply(reply: Reply) -> str:
    words = [f"reward {reply.reward:g}"]
    if not reply.valid:
        words.append("not understood")
    if reply.success is not None:
        words.append("success" if reply.success else "no success")
    if reply.done:
        words.append("over")
    return f"[{', '.join(words)}]"


def _prepare_model_to_watch_policy(args: argparse.Namespace, options: dict[str, Any]) -> PreparedRun:
    from headway.models.model_loading import max_sequence_length
    from headway.models.model_names import resolve_model

    longest = min(_LONGEST, max_sequence_length(resolve_model(args.model)) or _LONGEST)
    tree: dict[str, Any] = {
        "pretrain": args.model,
        "rollout_batch_size": 1,
        "sequence_length": longest,
        "actor_infer": {"generating_args": {"max_new_tokens": min(_TURN, longest // 2)}},
        "train_env_manager": {"tags": [_TAG], "group_size": 1},
        "custom_envs": {_TAG: {"env_type": args.environment, "env_config": options, "max_steps": args.max_steps}},
    }
    return prepare_run(load_config(tree))


def _watch_policy(prepared: PreparedRun, args: argparse.Namespace) -> int:
    if prepared.resolved.derived.pipeline != "agentic":
        raise ConfigError("plays in no environment", key="train_env_manager", value=None)
    found = select_evaluation_tasks(prepared, args.episodes)
    tasks = [
        Task(position=number, domain=task.domain, data={**task.data, SEED_KEY: args.seed + number})
        if args.seed or number >= len(found)
        else task
        for number, task in zip(range(args.episodes), cycle(found), strict=False)
    ]
    print(f"policy {prepared.policy.path}", flush=True)
    seat, tokenizer = asyncio.Lock(), prepared.policy.tokenizer
    judged = asyncio.run(
        evaluate_policy(prepared, tasks, watch=lambda environment: _WatchedEnvironment(environment, seat, tokenizer))
    )
    print()
    for one in judged:
        for reason in one.failures:
            print(f"the episode failed: {reason}", file=sys.stderr)
        for episode, score in one.answers:
            info = ", ".join(f"{name} {value}" for name, value in episode.info.items())
            cut = ", cut off" if episode.truncated else ""
            print(f"{one.task.domain}, seed {one.task.data.get(SEED_KEY)}: reward {score.value:g}{cut}; {info}")
    return 0 if all(one.answers for one in judged) else 1


class _WatchedEnvironment:
    """An environment whose turns are printed as they happen; the lock lets one episode play at a time.

    All tokens are printed, those of the chat template included: what the policy saw.
    """

    def __init__(self, environment: Environment, seat: asyncio.Lock, tokenizer: Any) -> None:
        self._environment, self._seat, self._tokenizer = environment, seat, tokenizer
        self._is_seated = False

    async def enter(self) -> None:
        await self._seat.acquire()
        self._is_seated = True
        limited = find_concurrency_limit(self._environment)
        if limited is not None:
            await limited.enter()

    async def reset(self, task: Task) -> Observation:
        print(f"\n{task.domain}, seed {task.data.get(SEED_KEY)}")
        return self._show(await self._environment.reset(task))

    async def step(self, generation: Generation) -> Observation:
        print(self._tokenizer.decode(list(generation.actions)), flush=True)
        observation = await self._environment.step(generation)
        print(f"[reward {observation.reward:g}{', over' if observation.done else ''}]")
        return self._show(observation)

    async def close(self) -> None:
        try:
            await self._environment.close()
        finally:
            if self._is_seated:
                self._seat.release()

    def _show(self, observation: Observation) -> Observation:
        print(self._tokenizer.decode(list(observation.tokens)), end="", flush=True)
        return observation
