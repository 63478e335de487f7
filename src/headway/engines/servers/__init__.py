"""Engines that are inference servers behind HTTP: vLLM and SGLang.

`server_engine` is the same for every server; what differs from server to server is in a dialect (`server_dialect`).
Needs `aiohttp`. docs/servers.md says what was run against real servers and what was not.
"""
