"""The program that calls a solution's functions inside the sandbox; its text is sent there, it is never imported.

It evaluates expressions and prints their values. What the values should be it does not know, and neither does the
solution beside it: whatever that one does to the interpreter, it can only lie by guessing right.
"""

HARNESS = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def plain(value, depth=0):
    kind = type(value)
    if depth > 50:
        return {"other": "too deep"}
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": repr(value)}
    if kind is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if kind in (list, tuple):
        return {"list": [plain(item, depth + 1) for item in value]}
    if kind in (set, frozenset):
        return {"set": [plain(item, depth + 1) for item in value]}
    if kind is dict:
        return {"dict": [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in value.items()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if hasattr(value, "tolist"):
        return plain(value.tolist(), depth + 1)
    if hasattr(value, "__next__"):
        return plain([item for item, _ in zip(value, range(10000))], depth + 1)
    return {"other": kind.__name__}

cases = json.load(sys.stdin)
with open("solution.py", encoding="utf-8") as file:
    source = file.read()
space = {"__name__": "solution"}
exec(compile(source, "solution.py", "exec"), space)
for index, (setup, expression) in enumerate(cases):
    try:
        inner = dict(space)
        exec(setup, inner)
        line = json.dumps([index, plain(eval(expression, inner))])
    except BaseException as error:
        line = json.dumps([index, {"other": type(error).__name__}])
    answers.write(line + "\\n")
    answers.flush()
os._exit(0)
"""
