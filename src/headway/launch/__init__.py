"""Make a run from a configuration. This is the only package that names concrete back ends.

docs/architecture.md has a table of its modules. Nothing here imports torch before it is needed.
"""
