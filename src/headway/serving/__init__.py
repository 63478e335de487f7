"""The OpenAI-compatible endpoint: an inference hub over HTTP, on its own or inside a training run.

request_errors         refusals in OpenAI's form, and typed access to the fields of a request
chat_messages          chat messages and tool calls
completion_requests    parsed and checked requests
chat_template          conversations as tokens, with the model's own chat template
completions            generated tokens as OpenAI's JSON, whole or streamed
direct_completions     requests that go straight to the hub, without training
agent_sessions         the requests of one external agent as the turns of one episode, token for token
agent_environment      the environment that plays such an episode, and the endpoint of a training run
agent_launch           starts external agents
completion_server      HTTP: routes, keys, limits

Only `completion_server` needs aiohttp. Nothing here knows a concrete engine or a trainer.
"""
