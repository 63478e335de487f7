"""Plugins: modules of the user's own that register stages, losses, rewards and the like under names.

A configuration lists them (`plugins: [my_module.py, package.module]`); an installed package may offer its own through
the entry point group `headway.plugins`. Every process of a run loads the configuration and with it the plugins, so a
name that a plugin registers is valid wherever a built-in name is.

Guarantees: a plugin is imported once per process. Whatever goes wrong is a `ConfigError` that names the plugin.
"""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from headway.errors import ConfigError
from headway.user_code import import_user_module

ENTRY_POINT_GROUP = "headway.plugins"


def load_plugins(names: Iterable[str]) -> None:
    """Import the plugins of installed packages and those in `names`. Raise `ConfigError` if one cannot be imported."""
    _load_installed_plugins()
    for name in names:
        import_user_module(name, key="plugins")


def find_plugin(name: str, directory: Path | None) -> str:
    """Return `name`; a file becomes an absolute path, looked for in the working directory and then in `directory`.

    The absolute path lets a resumed run and child processes find the file from any working directory.
    """
    if not name.endswith(".py"):
        return name
    places = [Path.cwd(), *([directory] if directory is not None else [])]
    found = (place / name for place in places if (place / name).is_file())
    return str(next(found, Path(name)).resolve())


@cache
def _load_installed_plugins() -> None:
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        _load_entry_point(entry_point)


def _load_entry_point(entry_point: EntryPoint) -> None:
    try:
        entry_point.load()
    except Exception as error:
        raise ConfigError(
            f"the installed plugin {entry_point.name} ({entry_point.value}) cannot be imported: {error!r}",
            key="plugins",
            hint="repair or uninstall the package that offers it",
        ) from error
