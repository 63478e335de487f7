"""Small modules that repair tasks are made of. These are right; `repair_bugs` breaks copies of them.

Each stands for itself and imports nothing but the standard library, so that a copy of its text works anywhere.
"""
