"""`headway push`: upload a checkpoint to a model hub, as a repository that `transformers` loads.

    headway push runs/mine me/my-model                  the newest checkpoint of a run
    headway push runs/mine/checkpoints/step-00000040 me/my-model --private

Takes the account of `hf auth login` or `HF_TOKEN`, and the hub of `HF_ENDPOINT`. Uploaded are weights, tokenizer and a
model card; the state of the optimizer stays here. `push_to_hub: me/my-model` does it at the end of a run.
"""

import argparse
import sys
from pathlib import Path

from headway.errors import ConfigError, HeadwayError
from headway.runs.hub_upload import check_hub_access, upload_checkpoint
from headway.runs.run_changes import CONFIG_FILE
from headway.runs.run_directory import find_checkpoint_of_run

HELP = "upload a checkpoint to a model hub"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN|CHECKPOINT", help="directory of a run or of a checkpoint")
    parser.add_argument("repository", metavar="OWNER/NAME", help="repository; it is made if it does not exist")
    parser.add_argument("--private", action="store_true", help="make it private if it is made")


def run_command(args: argparse.Namespace) -> int:
    """Upload, and print the address."""
    check_hub_access(args.repository, "push")
    is_run = (args.source / CONFIG_FILE).is_file()
    checkpoint = find_checkpoint_of_run(args.source, print) if is_run else args.source
    if checkpoint is None or not (checkpoint / "config.json").is_file():
        hint = "the directory of a run with a checkpoint, or a checkpoint"
        raise ConfigError("holds no checkpoint", key="push", value=str(args.source), hint=hint)
    try:
        print(upload_checkpoint(checkpoint, args.repository, private=args.private))
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
