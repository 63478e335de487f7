"""Writes a configuration of another project in our own shape, with comments on what changed."""

import json
import re
from typing import Any

from headway.config.document import KeyPath, nest_values
from headway.config.resolved_config import ResolvedConfig, split_key

_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")


def write_own_shape(resolved: ResolvedConfig) -> str:
    """Return YAML under our own keys that loads as the same configuration.

    A comment behind a value says which default of another project it is, or which key it is translated from. Comments
    at the top are the notes, which name every key that fell away.
    """
    values = {tuple(split_key(resolved.config, key)): value for key, value in resolved.list_given().items()}
    lines = [f"# {' '.join(note.split())}" for note in resolved.notes]
    _write_section(nest_values(values), (), values, resolved, lines)
    return "\n".join(lines) + "\n"


def _write_section(
    tree: dict[str, Any], path: KeyPath, values: dict[KeyPath, Any], resolved: ResolvedConfig, lines: list[str]
) -> None:
    for name, value in tree.items():
        here, indent = (*path, name), "  " * len(path)
        shown = name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)
        if here not in values:
            lines.append(f"{indent}{shown}:")
            _write_section(value, here, values, resolved, lines)
            continue
        origin = " ".join(resolved.provenance.get(".".join(here), "").split())
        comment = f"  # {origin}" if origin.startswith(("default of ", "translated from ", "derived: ")) else ""
        lines.append(f"{indent}{shown}: {json.dumps(value, ensure_ascii=False)}{comment}")
