"""Make a run from a configuration: its components, its environments, the session around them.

This is the only package that names concrete back ends; `headway.placement` plans what is made here.
docs/architecture.md has a table of the modules. Nothing here imports torch before it is needed.
"""
