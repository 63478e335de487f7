"""Entries while keys of another project that only make sense together are replaced by ours."""

from typing import Any

from headway.config.document import ConfigEntries, ConfigEntry, KeyPath
from headway.errors import ConfigError


class ForeignEntries:
    """Entries of another project, some of which are replaced by entries under our own keys."""

    def __init__(self, entries: ConfigEntries, notes: list[str], problems: list[ConfigError]) -> None:
        self.entries = dict(entries)
        self._dotted = {path[:2] for path in entries if len(path) > 2 and "." in path[1]}
        """Sections with names of the user's that have dots."""
        self.notes = notes
        self.problems = problems

    def split(self, key: str) -> KeyPath:
        """Return the parts of a key; names of sections may have dots."""
        for root, name in self._dotted:
            if f"{key}.".startswith(f"{root}.{name}."):
                rest = key[len(root) + len(name) + 2 :]
                return (root, name, *(rest.split(".") if rest else ()))
        return tuple(key.split("."))

    def get(self, key: str) -> Any:
        """Return the value of a key, `None` if it is not given."""
        entry = self.entries.get(self.split(key))
        return None if entry is None else entry.value

    def take(self, key: str) -> Any:
        """Return the value of a key and remove it."""
        entry = self.entries.pop(self.split(key), None)
        return None if entry is None else entry.value

    def has_below(self, root: str) -> bool:
        """Return whether any key below `root` is given."""
        parts = self.split(root)
        return any(path[: len(parts)] == parts for path in self.entries)

    def give(self, target: str, value: Any, source: str) -> None:
        """Set one of our keys unless it is given."""
        self.entries.setdefault(self.split(target), ConfigEntry(value, f"translated from {source}"))

    def give_default(self, target: str, value: Any, project: str) -> None:
        """Set one of our keys to the value that it has in another project, unless it is given."""
        self.entries.setdefault(self.split(target), ConfigEntry(value, f"default of {project}"))

    def take_number(self, key: str, default: float, least: float, most: float = 1e9) -> float:
        """Return a number and remove its key; one that is none, too small or too large is a problem."""
        entry = self.entries.pop(self.split(key), None)
        if entry is None or entry.value is None:
            return default
        if (
            isinstance(entry.value, bool)
            or not isinstance(entry.value, int | float)
            or not least <= entry.value <= most
        ):
            hint = f"expected a number from {least:g} to {most:g}"
            self.problems.append(
                ConfigError(f"is out of range [{entry.origin}]", key=key, value=entry.value, hint=hint)
            )
            return default
        return entry.value
