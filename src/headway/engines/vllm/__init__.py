"""vLLM inside an engine's own process: its `AsyncLLM`, without HTTP in between.

in_process_engine  requests, pauses, updates and crashes; versions gathered in shared memory for vLLM's workers
vllm_core          the calls of `AsyncLLM` that the engine needs
worker_path        what vLLM's workers import to load weights, of launched servers too

The engine lives in a child process (`headway.launch.inference_servers`), which may run under another interpreter than
the run: nothing here imports more than the standard library and Headway before vLLM does.
"""
