"""Extras: the groups of optional packages in pyproject.toml, and how to install those that are missing.

Commands name the packages themselves, so they are right for a clone, a wheel and a package index alike.
"""

import re

_NAME = "headway"


def suggest_install(extra: str) -> str:
    """Return the command that installs what is missing of an extra into the environment that is in use."""
    listed = _list_requirements(extra)
    wanted = [one for one in listed if not _is_installed(one)] or listed or [f"{_NAME}[{extra}]"]
    return f"pip install {' '.join(repr(requirement) for requirement in wanted)}"


def _list_requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, such as `peft>=0.17`; none where Headway was not installed by pip."""
    from importlib.metadata import PackageNotFoundError, requires  # takes long to import, and is rarely needed

    try:
        listed = requires(_NAME) or []
    except PackageNotFoundError:
        return []
    marked = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    return [requirement.partition(";")[0].strip() for requirement in listed if marked.search(requirement)]


def _is_installed(requirement: str) -> bool:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
    except PackageNotFoundError:
        return False
    return True
