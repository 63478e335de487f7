"""The OpenAI-compatible endpoint: a hub spoken to over HTTP, alone or inside a training run.

requests    what a client asks for, checked
chat        conversations as tokens, by the model's own template; tool calls in what it says
answers     what was generated, as the protocol writes it, at once or piece by piece
direct      questions that nobody trains on go to the hub as they come
sessions    the calls of one foreign agent as the turns of one episode, token for token
foreign     an environment whose world is somebody else's agent
launch      ways to start that agent
server      HTTP: routes, tokens, limits

Only `server` needs aiohttp. Nothing here knows a concrete engine or a trainer.
"""
