"""Environments that come with Headway. Each is one world; libraries of others are imported when it is made."""

from __future__ import annotations

LIBRARY_ENVIRONMENTS: dict[str, str] = {
    "alfworld": "headway.environments.library.alfworld:ALFWorld",
    "repair": "headway.environments.library.repair:RepairEnvironment",
    "scienceworld": "headway.environments.library.scienceworld:ScienceWorld",
    "shop": "headway.environments.library.shop:ShopEnvironment",
    "sokoban": "headway.environments.library.sokoban:Sokoban",
    "textworld": "headway.environments.library.textworld:TextWorldExpress",
    "tools": "headway.environments.tools.tool_environment:ToolEnvironment",
    "verifiers": "headway.environments.library.verifiers_environment:VerifiersEnvironment",
}
"""Name → module:class, as the registry reads them."""
