"""Engines that are inference servers behind HTTP: vLLM and SGLang.

server_engine       requests, pauses, updates and crashes, the same for every server
server_dialect      what differs from server to server, as one protocol; the checks before a server is used
vllm_dialect        the protocol of vLLM, with its development endpoints
sglang_dialect      the protocol of SGLang
http_client         calls with deadlines, streams of events, and what can go wrong with either
directory_receiver  versions that arrive as buckets and become directories which a server can load
server_process      how a server is used, and with what it is started; servers by address, and launched ones

Needs `aiohttp`. docs/servers.md says what was run against real servers and what was not.
"""
