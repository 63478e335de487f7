"""`headway eval`: how good is a policy on held-out tasks?

    headway eval runs/mine                      the newest checkpoint of a run
    headway eval run.yaml pretrain=MODEL        any model, on the tasks and rewards of a configuration
    headway eval runs/mine --answers 8          also how often one of eight is right

Without held-out tasks those of training are taken, and a note on standard error says so.
Prints the mean reward with its standard error, per domain where there are several; of agents also how many episodes
succeeded, how long they were, and which share of the turns was not understood. `--out` keeps every answer.
"""

import argparse
import asyncio
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from headway.cli import command_line
from headway.errors import ConfigError
from headway.launch.inference_session import evaluate_policy, select_evaluation_tasks
from headway.launch.training_session import prepare_run
from headway.rollout.sample_evaluation import EvaluatedSample, mean_outcomes

HELP = "judge a policy on held-out tasks"
_OUTCOMES = ("success", "turns", "invalid")
"""Columns for episodes in environments."""
_TRAINED_ON = (
    "note: nothing is held out, so these are tasks that are trained on "
    "(actor_train.data_args.holdout, or validation.data_args.file_name)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_run_arguments(parser)
    parser.add_argument("--answers", type=command_line.at_least_one, default=1, help="answers to each task (1)")
    parser.add_argument("--limit", type=command_line.at_least_one, help="tasks at most")
    parser.add_argument("--out", type=Path, help="write every answer to this file, one JSON object a line")
    command_line.add_json_option(parser)


def run_command(args: argparse.Namespace) -> int:
    """Answer the tasks, judge the answers and print the result. Return 1 when no task could be judged."""
    policy = any(word.startswith("pretrain=") for word in args.arguments)
    newest = [] if policy or not args.arguments else command_line.make_policy_override(args.arguments[0])
    prepared = prepare_run(command_line.load_run_config([*args.arguments, *newest]))
    tasks = select_evaluation_tasks(prepared, args.limit)
    if prepared.sources.validation is None:
        print(_TRAINED_ON, file=sys.stderr)
    with _open_output(args.out) as out:
        judged = asyncio.run(evaluate_policy(prepared, tasks, answers=args.answers))
        if out is not None:
            out.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in make_answer_rows(judged))
    result = {"policy": str(prepared.policy.path), "answers": args.answers, "domains": summarize_answers(judged)}
    if args.json:
        command_line.print_json(result)
    else:
        _print(result)
    return 0 if any(one.answers for one in judged) else 1


def _open_output(path: Path | None) -> AbstractContextManager[TextIO | None]:
    """Open the file for answers before the first of them is made, so that a wrong path costs nothing."""
    if path is None:
        return nullcontext()
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="--out", value=str(path)) from error


def summarize_answers(judged: Sequence[EvaluatedSample]) -> dict[str, dict[str, float | int]]:
    """Return counts, mean reward with its standard error and mean of the best answers, by domain and over all."""
    domains: dict[str, list[EvaluatedSample]] = defaultdict(list)
    for one in judged:
        domains[one.task.domain].append(one)
    if len(domains) > 1:
        domains["all"] = list(judged)
    return {domain: _summarize_domain(group) for domain, group in domains.items()}


def _summarize_domain(judged: Sequence[EvaluatedSample]) -> dict[str, float | int]:
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
    """Return every answer as a plain object; for an episode also the text of each turn and its outcome."""
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


def _print(result: dict[str, Any]) -> None:
    console = command_line.make_console()
    more = [name for name in _OUTCOMES if any(name in row for row in result["domains"].values())]
    table = Table("domain", "tasks", "failed", "reward", f"best of {result['answers']}", *more)
    for domain, row in result["domains"].items():
        reward = f"{row['reward']:.3f} ± {row['standard_error']:.3f}"
        outcomes = [f"{row[name]:.3f}" if name in row else "-" for name in more]
        table.add_row(domain, str(row["tasks"]), str(row["failed"]), reward, f"{row['best_of_answers']:.3f}", *outcomes)
    console.print(f"policy {result['policy']}", soft_wrap=True, markup=False)
    console.print(table)
