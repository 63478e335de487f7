"""The OpenAI-compatible endpoint: an inference hub over HTTP, on its own or inside a training run.

A request passes `completion_server` (HTTP), `completion_requests` (parsed and checked) and `chat_template` (as tokens).
`direct_completions` sends it straight to the hub; inside a training run, `agent_sessions` makes it a turn of an episode
that `agent_environment` plays. `completions` writes the answer. Only `completion_server` needs aiohttp. Nothing here
knows a concrete engine or a trainer.
"""
