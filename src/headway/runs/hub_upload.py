"""Uploads checkpoints to a model hub, with what others need to load them and a card that says what they are."""

from pathlib import Path

from headway.errors import ConfigError, HeadwayError
from headway.extras import import_optional
from headway.version import VERSION

_STAYS_HERE = ["optimizer*", "trainer.json", "files.json", "*.distcp", "critic/*", "rank*"]
"""Files of a checkpoint that only a resumed run reads."""
_CARD = """---
library_name: transformers
tags: [headway, reinforcement-learning]
---

# {name}

Trained by reinforcement learning with Headway {version}; this is `{checkpoint}`.
"""


def check_hub_access(repository: str, key: str) -> None:
    """Raise `ConfigError` if the hub could not be written to: a malformed name, no package, no account."""
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ConfigError("is no repository", key=key, value=repository, hint="owner/name")
    problem = "needs huggingface_hub, which is not installed"
    hub = import_optional("huggingface_hub", extra="train", key=key, value=repository, problem=problem)
    if hub.get_token() is None:
        raise ConfigError("no account is known", key=key, value=repository, hint="hf auth login, or HF_TOKEN")


def upload_checkpoint(checkpoint: Path, repository: str, *, private: bool = False) -> str:
    """Upload a checkpoint and return the address of the repository. Raise `HeadwayError` if the hub refuses."""
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        message = f"Upload {checkpoint.name}"
        hub.upload_folder(
            repo_id=repository, folder_path=checkpoint, ignore_patterns=_STAYS_HERE, commit_message=message
        )
        if not (checkpoint / "README.md").exists() and not hub.file_exists(repository, "README.md"):
            card = _CARD.format(name=repository.split("/")[1], version=VERSION, checkpoint=checkpoint.name)
            hub.upload_file(
                repo_id=repository, path_in_repo="README.md", path_or_fileobj=card.encode(), commit_message="Add a card"
            )
    except Exception as error:  # the package raises errors of several HTTP libraries
        problem = f"{checkpoint} could not be uploaded to {repository}: {type(error).__name__}: {error}"
        raise HeadwayError(f"{problem}\ntry again with: headway push {checkpoint} {repository}") from error
    return str(address)
