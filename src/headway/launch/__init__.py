"""Make a run from a configuration. This is the only package that names concrete back ends.

placement              where components live: device, processes, threads, ranks, resources of a cluster
transports             how weights get from the trainer into the engines
inference_servers      engines of vLLM and SGLang
components             what all kinds of models share; the `ModelFamily` protocol
language_components    trainer, engines and scorers of language models
denoising_components   trainer and engines of denoising models
environment_pool       environments and the tasks that they start from
memory_needs           how much memory the components will take
run_directory          lock, configuration and control socket of a run
training_session       a whole training run
inference_session      evaluation and serving of a policy

Nothing here imports torch before it is needed.
"""
