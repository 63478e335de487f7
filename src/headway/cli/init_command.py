"""`headway init`: write a starter project: data, a reward of your own and a commented configuration.

    headway init sums && cd sums
    headway train run.yaml

It trains a tiny model that is made on the spot, in a minute on two cores. Replace model, data and reward by your own.
"""

import argparse
import json
from pathlib import Path

from headway.errors import ConfigError

HELP = "write a starter project"
_REWARD = '''"""A reward takes the text of an answer and its row of the data, and returns a number."""


def closeness(text, row):
    """1 for the right sum, a fifth less for each that it is off, 0 for what is no number."""
    if not text.strip().isdigit():
        return 0.0
    return max(0.0, 1 - abs(int(text) - int(row["answer"])) / 5)
'''
_CONFIG = """# headway train run.yaml --dry-run     reads and checks everything, starts nothing
# headway train run.yaml               trains; Ctrl-C stops it after the step, and the same command goes on
# headway eval runs/first --answers 4  judges the newest checkpoint on held-out tasks
# headway report runs/first            writes a page with curves and answers
# headway config explain run.yaml      every value, and where it comes from

output_dir: runs/first

# The model: a directory, a .gguf file, or a hub name such as Qwen/Qwen2.5-0.5B-Instruct.
# tiny-sums is made on the spot and knows only digits, + and =.
pretrain: tiny-sums

# How many batches rollout runs ahead of training; 0 is synchronous. The loss must correct for old samples: tis does.
async_generation_ratio: 1
pg_variant: tis

rollout_batch_size: 16               # prompts of a step ...
num_return_sequences_in_group: 8     # ... and answers to each; they are compared with each other
prompt_length: 16                    # in tokens
response_length: 4

max_steps: 60
eval_steps: 20                       # held-out tasks are judged every twenty steps, and before the first
save_steps: 20                       # a checkpoint that transformers loads

actor_train:
  training_args:
    learning_rate: 1.0e-3            # for a tiny model; 1.0e-6 is usual for one of billions
    per_device_train_batch_size: 16  # samples in memory at once
  data_args:
    file_name: train.jsonl           # a row has `prompt`, and what the reward needs
    holdout: 0.2                     # a fifth is never trained on

rewards:
  mine: {reward_fn: "my_rewards.py:closeness"}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", nargs="?", type=Path, default=Path(), metavar="DIR", help="where to (here)")


def run_command(args: argparse.Namespace) -> int:
    """Write the files. Raise `ConfigError` if one of them is there already: nothing is overwritten."""
    rows = ({"prompt": f"{n // 10}+{n % 10}=", "answer": str(n // 10 + n % 10)} for n in range(100))
    data = "".join(f"{json.dumps(row)}\n" for row in rows)
    files = {"train.jsonl": data, "my_rewards.py": _REWARD, "run.yaml": _CONFIG}
    present = [name for name in files if (args.directory / name).exists()]
    if present:
        hint = "another directory"
        raise ConfigError(f"holds {', '.join(present)} already", key="init", value=str(args.directory), hint=hint)
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (args.directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="init", value=str(args.directory)) from error
    for name in files:
        print(args.directory / name)
    go = "" if args.directory == Path() else f"cd {args.directory} && "
    print(f"next: {go}headway train run.yaml")
    return 0
