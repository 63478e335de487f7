"""`headway eval`: how good is a policy on held-out tasks?

    headway eval runs/mine                      the newest checkpoint of a run
    headway eval run.yaml pretrain=MODEL        any model, on the tasks and rewards of a configuration
    headway eval runs/mine --answers 8          also how often one of eight is right

Without held-out tasks those of training are taken, and a note on standard error says so.
Prints the mean reward with its standard error, per domain where there are several; of agents also how many episodes
succeeded, how long they were, and which share of the turns was not understood. `--out` keeps every answer.

An answer without a verdict (the reward raised, was late or gave no number) is left out of the mean, and its reason is
printed. Exit codes: 0 every answer was judged, 1 some were not or the policy could not be served, 2 the input is wrong.
"""

import argparse
import asyncio
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from headway.cli import command_line
from headway.errors import ConfigError
from headway.launch.components import make_decoder
from headway.launch.inference_session import evaluate_policy, select_evaluation_tasks
from headway.launch.training_session import prepare_run
from headway.rollout.environment_agent import Decode
from headway.rollout.sample_evaluation import EvaluatedSample, count_failures, mean_outcomes
from headway.runs.sample_logs import make_sample_row

HELP = "judge a policy on held-out tasks"
_OUTCOMES = ("success", "turns", "invalid")
"""Columns for episodes in environments."""
_MEANS = ("reward", "best_of_answers")
_MOST_REASONS = 10
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
    """Answer the tasks, judge the answers and print the result. Return 1 if an answer could not be judged."""
    policy = any(word.startswith("pretrain=") for word in args.arguments)
    newest = [] if policy or not args.arguments else command_line.make_policy_override(args.arguments[0])
    prepared = prepare_run(command_line.load_run_config([*args.arguments, *newest]))
    tasks = select_evaluation_tasks(prepared, args.limit)
    if prepared.sources.validation is None:
        print(_TRAINED_ON, file=sys.stderr)
    with _open_output(args.out) as out:
        judged = asyncio.run(evaluate_policy(prepared, tasks, answers=args.answers))
        if out is not None:
            data, decode = prepared.resolved.config.actor_train.data_args, make_decoder(prepared.policy.tokenizer)
            rows = make_answer_rows(judged, prompt=data.prompt, answer=data.answer, decode=decode)
            out.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    result = {"policy": str(prepared.policy.path), "answers": args.answers, "domains": summarize_answers(judged)}
    failures = count_failures(judged)
    if args.json:
        command_line.print_json({**result, "failures": failures})
    else:
        _print(result)
    _print_failures(failures, len(tasks) * args.answers)
    return 1 if failures else 0


def _open_output(path: Path | None) -> AbstractContextManager[TextIO | None]:
    """Open the file for answers before the first of them is made, so that a wrong path costs nothing."""
    if path is None:
        return nullcontext()
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="--out", value=str(path)) from error


def summarize_answers(judged: Sequence[EvaluatedSample]) -> dict[str, dict[str, float | int | None]]:
    """Return counts, mean reward with its standard error and mean of the best answers, by domain and over all.

    Numbers that do not exist are None: a mean of no answer, the standard error of a single task.
    """
    domains: dict[str, list[EvaluatedSample]] = defaultdict(list)
    for one in judged:
        domains[one.task.domain].append(one)
    if len(domains) > 1:
        domains["all"] = list(judged)
    return {domain: _summarize_domain(group) for domain, group in domains.items()}


def _summarize_domain(judged: Sequence[EvaluatedSample]) -> dict[str, float | int | None]:
    means = [one.mean for one in judged if one.answers]
    best = [max(score.value for _, score in one.answers) for one in judged if one.answers]
    count = len(means)
    mean = sum(means) / count if count else math.nan
    spread = sum((value - mean) ** 2 for value in means) / (count - 1) if count > 1 else math.nan
    return {
        "tasks": len(judged),
        "answers": sum(len(one.answers) for one in judged),
        "failed": sum(len(one.failures) for one in judged),
        "reward": mean if count else None,
        "standard_error": math.sqrt(spread / count) if count > 1 else None,
        "best_of_answers": sum(best) / count if count else None,
        **mean_outcomes([episode.info for one in judged for episode, _ in one.answers]),
    }


def make_answer_rows(
    judged: Sequence[EvaluatedSample], *, prompt: str, answer: str | None, decode: Decode
) -> list[dict[str, Any]]:
    """Return every answer with the fields of `samples.jsonl` and its `task`; one without a verdict has a `failure`."""
    failed = [
        {"task": dict(one.task.data), "prompt": one.task.data.get(prompt), "reward": None, "failure": reason}
        for one in judged
        for reason in one.failures
    ]
    return failed + [
        {"task": dict(one.task.data), **make_sample_row(episode, score, prompt=prompt, answer=answer, decode=decode)}
        for one in judged
        for episode, score in one.answers
    ]


def _print(result: dict[str, Any]) -> None:
    console = command_line.make_console()
    more = [name for name in _OUTCOMES if any(name in row for row in result["domains"].values())]
    table = Table("domain", "tasks", "judged answers", "failed", "reward", f"best of {result['answers']}", *more)
    for domain, row in result["domains"].items():
        numbers = {name: "-" if row.get(name) is None else f"{row[name]:.3f}" for name in (*more, *_MEANS)}
        reward = numbers["reward"] + ("" if row["standard_error"] is None else f" ± {row['standard_error']:.3f}")
        counts = [str(row[name]) for name in ("tasks", "answers", "failed")]
        table.add_row(domain, *counts, reward, numbers["best_of_answers"], *(numbers[name] for name in more))
    console.print(f"policy {result['policy']}", soft_wrap=True, markup=False)
    console.print(table)


def _print_failures(failures: Counter[str], asked: int) -> None:
    """Say on standard error why answers have no verdict."""
    if failures:
        print(f"{failures.total()} of {asked} answers have no verdict and are left out of the mean:", file=sys.stderr)
        for reason, count in failures.most_common(_MOST_REASONS):
            print(f"  {count} × {reason}", file=sys.stderr)
    if len(failures) > _MOST_REASONS:
        print(f"  and {len(failures) - _MOST_REASONS} other reasons", file=sys.stderr)
