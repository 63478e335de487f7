"""Engines that are servers of somebody else, behind HTTP: vLLM and SGLang.

engine     requests, pauses, flips, crashes: what the hub sees; the same for every server
dialect    what differs from server to server, as one protocol
launch     what a server of our own is started with
vllm       that of vLLM, with its development endpoints
sglang     that of SGLang
link       HTTP: calls with deadlines, streams, and what can go wrong with either
receiver   versions that arrive as buckets and become directories which a server can load
files      one version on the disk: a safetensors file, written in place
process    a server of our own, in a process group that ends with us (guard)

Needs `aiohttp`. What was run against real servers and what was not is said in docs/servers.md.
"""
