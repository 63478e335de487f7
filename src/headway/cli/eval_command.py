"""`headway eval`: how good is a policy on held-out tasks?

    headway eval runs/mine                      the newest checkpoint of a run
    headway eval run.yaml pretrain=MODEL        any model, on the tasks and rewards of a configuration
    headway eval runs/mine --answers 8          also how often one of eight is right

Without held-out tasks those of training are taken, and a note on standard error says so.
Prints the mean reward with its standard error, per domain where there are several; of agents also how many episodes
succeeded, how long they were, and which share of the turns was not understood. `--out` keeps every answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from headway.cli.train_command import PIPE_WIDTH, load_run_config
from headway.errors import ConfigError
from headway.launch.inference_session import evaluate_policy, select_evaluation_tasks
from headway.launch.run_directory import find_checkpoint_of_run
from headway.launch.training_session import prepare_run
from headway.rollout.sample_evaluation import EvaluatedSample, mean_outcomes

_OUTCOMES = ("success", "turns", "invalid")
"""Of episodes in environments."""
_TRAINED_ON = (
    "note: nothing is held out, so these are tasks that are trained on "
    "(actor_train.data_args.holdout, or validation.data_args.file_name)"
)

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: _SubParsers) -> None:
    """Add `eval`."""
    parser = subparsers.add_parser("eval", help="judge a policy on held-out tasks")
    parser.add_argument(
        "arguments", nargs="*", metavar="FILE|RUN|key=value", help="YAML file or run directory, then overrides"
    )
    parser.add_argument("--answers", type=_positive, default=1, help="answers to each task (1)")
    parser.add_argument("--limit", type=_positive, help="tasks at most")
    parser.add_argument("--out", type=Path, help="write every answer to this file, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    """Answer, judge, print. Exit code 1 when no task could be judged."""
    resolved = load_run_config([*args.arguments, *_newest(args.arguments)])
    prepared = prepare_run(resolved)
    tasks = select_evaluation_tasks(prepared, args.limit)
    if prepared.sources.validation is None:
        print(_TRAINED_ON, file=sys.stderr)
    with _opened(args.out) as out:
        judged = asyncio.run(evaluate_policy(prepared, tasks, answers=args.answers))
        if out is not None:
            out.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in make_answer_rows(judged))
    result = {"policy": str(prepared.policy.path), "answers": args.answers, "domains": summarize_answers(judged)}
    if args.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        _print(result)
    return 0 if any(one.answers for one in judged) else 1


def _opened(path: Path | None) -> AbstractContextManager[TextIO | None]:
    """Where answers go; known to be writable before the first of them is made."""
    if path is None:
        return nullcontext()
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="--out", value=str(path)) from error


def summarize_answers(judged: Sequence[EvaluatedSample]) -> dict[str, dict[str, float | int]]:
    """Per domain and over all: tasks, failed ones, mean reward with its standard error, mean of the best answers."""
    domains: dict[str, list[EvaluatedSample]] = defaultdict(list)
    for one in judged:
        domains[one.task.domain].append(one)
    if len(domains) > 1:
        domains["all"] = list(judged)
    return {domain: _numbers(group) for domain, group in domains.items()}


def _numbers(judged: Sequence[EvaluatedSample]) -> dict[str, float | int]:
    means = [one.mean for one in judged if one.answers]
    best = [max(score.value for _, score in one.answers) for one in judged if one.answers]
    count = len(means)
    mean = sum(means) / count if count else 0.0
    spread = sum((value - mean) ** 2 for value in means) / (count - 1) if count > 1 else 0.0
    return {
        "tasks": len(judged),
        "failed": len(judged) - count,
        "reward": mean,
        "standard_error": math.sqrt(spread / count) if count else 0.0,
        "best_of_answers": sum(best) / count if count else 0.0,
        **mean_outcomes([episode.info for one in judged for episode, _ in one.answers]),
    }


def make_answer_rows(judged: Sequence[EvaluatedSample]) -> list[dict[str, Any]]:
    """Every answer as a plain object; of an episode also what was said turn by turn, and its outcome."""
    return [
        {
            **one.task.data,
            "answer_text": episode.turns[-1].generation.text,
            "reward": score.value,
            **score.parts,
            **episode.info,
            **({"turn_texts": [turn.generation.text for turn in episode.turns]} if len(episode.turns) > 1 else {}),
        }
        for one in judged
        for episode, score in one.answers
    ]


def _newest(arguments: Sequence[str]) -> list[str]:
    """Of a run directory, the newest checkpoint, unless another policy is named."""
    if not arguments or not Path(arguments[0]).is_dir() or any(word.startswith("pretrain=") for word in arguments):
        return []
    checkpoint = find_checkpoint_of_run(Path(arguments[0]))
    return [] if checkpoint is None else [f"pretrain={checkpoint}"]


def _print(result: dict[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    more = [name for name in _OUTCOMES if any(name in row for row in result["domains"].values())]
    table = Table("domain", "tasks", "failed", "reward", f"best of {result['answers']}", *more)
    for domain, row in result["domains"].items():
        reward = f"{row['reward']:.3f} ± {row['standard_error']:.3f}"
        told = [f"{row[name]:.3f}" if name in row else "-" for name in more]
        table.add_row(domain, str(row["tasks"]), str(row["failed"]), reward, f"{row['best_of_answers']:.3f}", *told)
    console.print(f"policy {result['policy']}", soft_wrap=True, markup=False)
    console.print(table)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
