"""Environments that come with Headway. Each is one world; libraries of others are imported when it is made."""

from __future__ import annotations

LIBRARY: dict[str, str] = {
    "shop": "headway.environments.library.shop:Shop",
    "sokoban": "headway.environments.library.sokoban:Sokoban",
}
"""Name → module:class, as the registry reads them."""
