"""`headway play`: step through an environment by hand, or watch a policy in it.

    headway play                                                  the environments there are
    headway play frozen_lake is_slippery=false --seed 3           by hand: a line is an action, Ctrl-D ends
    headway play my_worlds.py:Maze size=5 --model MODEL           a model plays it
    headway play runs/mine                                        the newest policy of a run, as the run plays

Exit code 1 where an episode failed.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from headway.cli.command_line import load_run_config, make_policy_override
from headway.config import load_config
from headway.environments.environment_registry import list_environment_names, make_environment
from headway.environments.local_host import LocalEnvironmentHost
from headway.environments.text_environment import Reply
from headway.environments.text_episode import SEED_KEY
from headway.errors import ConfigError, EnvironmentFailed
from headway.launch.inference_session import evaluate_policy, select_evaluation_tasks
from headway.launch.training_session import PreparedRun, prepare_run
from headway.types import Episode, Task

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
    parser.add_argument("--episodes", type=int, default=1, help="how many a policy plays (1)")


def run_command(args: argparse.Namespace) -> int:
    """Play by hand, or let a policy play where there is one."""
    if args.environment is None:
        print("\n".join(list_environment_names()))
        return 0
    if Path(args.environment).is_dir() or args.environment.endswith((".yaml", ".yml")):
        # what a run plays, with its newest policy or the one that is named
        policy = make_policy_override(args.environment, args.model)
        return _watch_policy(prepare_run(load_run_config([args.environment, *args.arguments, *policy])), args)
    options = _parse_options(args.arguments)
    if args.model is None:
        return _play_by_hand(args.environment, options, args.seed)
    return _watch_policy(_prepare_model_to_watch_policy(args.environment, options, args.model), args)


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


def _play_by_hand(name: str, options: dict[str, Any], seed: int) -> int:
    make_environment(name, **options)  # raises ConfigError where the name or an option is wrong
    host = LocalEnvironmentHost(name, lambda: make_environment(name, **options))
    with asyncio.Runner() as runner:
        seat, earned = host.make_slot(), 0.0
        try:
            traits = runner.run(seat.open())
            if traits.instructions:
                print(traits.instructions, end="\n\n")
            reply = runner.run(seat.reset(seed, {}))
            print(reply.text)
            while not reply.done:
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


def _prepare_model_to_watch_policy(name: str, options: dict[str, Any], model: str) -> PreparedRun:
    from headway.models.model_loading import max_sequence_length
    from headway.models.model_names import resolve_model

    longest = min(_LONGEST, max_sequence_length(resolve_model(model)) or _LONGEST)
    tree: dict[str, Any] = {
        "pretrain": model,
        "rollout_batch_size": 1,
        "sequence_length": longest,
        "actor_infer": {"generating_args": {"max_new_tokens": min(_TURN, longest // 2)}},
        "train_env_manager": {"tags": [_TAG], "group_size": 1},
        "custom_envs": {_TAG: {"env_type": name, "env_config": options}},
    }
    return prepare_run(load_config(tree))


def _watch_policy(prepared: PreparedRun, args: argparse.Namespace) -> int:
    if prepared.resolved.derived.pipeline != "agentic":
        raise ConfigError("plays in no environment", key="train_env_manager", value=None)
    tasks = select_evaluation_tasks(prepared, args.episodes)
    if args.seed:
        tasks = [
            Task(position=task.position, domain=task.domain, data={**task.data, SEED_KEY: args.seed + number})
            for number, task in enumerate(tasks)
        ]
    print(f"policy {prepared.policy.path}", flush=True)
    judged = asyncio.run(evaluate_policy(prepared, tasks))
    for one in judged:
        print(f"\n{one.task.domain}, seed {one.task.data.get(SEED_KEY)}")
        if not one.answers:
            print("the episode failed", file=sys.stderr)
        for episode, score in one.answers:
            _print(episode, prepared.policy.tokenizer)
            info = ", ".join(f"{name} {value}" for name, value in episode.info.items())
            print(f"[reward {score.value:g}{', cut off' if episode.truncated else ''}; {info}]")
    return 0 if all(one.answers for one in judged) else 1


def _print(episode: Episode, tokenizer: Any) -> None:
    """Print all tokens, those of the chat template included: what the policy saw."""
    for turn in episode.turns:
        print(tokenizer.decode(list(turn.observation)), end="")
        print(tokenizer.decode(list(turn.generation.actions)), end=f"\n[reward {turn.reward:g}]\n")
