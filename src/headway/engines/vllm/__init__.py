"""vLLM inside an engine's own process: its `AsyncLLM`, without HTTP in between.

engine     requests, pauses, flips, crashes: what the hub's calls become
core       what of vLLM they need, as one protocol
llm        that of `AsyncLLM`: the only module here that imports vLLM
family     the processes that vLLM starts, and how they end with ours (leash)

It lives in a child process (`headway.launch.inference_servers`), which may run under another interpreter than ours: nothing here
imports more than the standard library and Headway before vLLM does.
"""
