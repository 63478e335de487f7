"""vLLM inside an engine's own process: its `AsyncLLM`, without HTTP in between.

The engine lives in a child process (`headway.launch.inference_servers`), which may run under another interpreter than
the run: nothing here imports more than the standard library and Headway before vLLM does. What vLLM's workers import to
load weights, those of launched servers too, is in `worker_path`.
"""
