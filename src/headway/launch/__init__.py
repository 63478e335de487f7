"""From a configuration to a run: the one package that may name concrete back ends.

placement   which device, which processes, how many threads
parts       trainer and engine, made where they run
children    the same parts as targets of child processes
backends    everything a flow drives, behind protocols
images      the same for flow models, whose actions are denoising steps
kinds       which of the two a run is made of
fleet       the engines of a run, and those that may join it
control     the socket by which a run at work is spoken to
rundir      the directory of a run: lock, configuration, logs
training    a whole run, from the first check to the last page
evaluation  a policy on held-out tasks

Nothing here imports torch before it is needed.
"""
