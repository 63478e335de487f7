"""A saved configuration may be asked about another model than the one it was trained from."""

from __future__ import annotations

from pathlib import Path

import yaml

from headway.cli.command_line import resolve_source
from headway.runs.run_changes import CONFIG_FILE


def test_another_pretrain_is_another_model_for_every_role_that_holds_the_policy(tmp_path: Path) -> None:
    written = {
        role: {"model_args": {"model_name_or_path": "a"}} for role in ("actor_train", "actor_infer", "reference")
    }
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump({"pretrain": "a", "use_kl_loss": True, **written}))
    config = resolve_source(str(tmp_path), ["pretrain=b"]).config
    for role in (config.actor_train, config.actor_infer, config.reference):
        assert role.model_args.model_name_or_path == "b"
