"""Python values as fairseq's options and checkpoints write them, read without running code.

fairseq gives texts such as ``[(512, 3)] * 20``, which a checkpoint's model has too, to Python's eval.
"""

import ast
from typing import Any

_ACCEPTED = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Load),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.UnaryOp, ast.USub),
)


def evaluate(text: Any) -> Any:
    """The value of an expression of numbers, texts, lists and dictionaries, joined by +, - and *.

    Raises TypeError where ``text`` is no text, as eval does, and ValueError where there is anything else in it.
    """
    if not isinstance(text, str):
        raise TypeError(f"a value must be given as text, got {text!r}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        if all(isinstance(node, _ACCEPTED) for node in ast.walk(tree)):
            return eval(compile(tree, "<value>", "eval"), {"__builtins__": {}})
    except (SyntaxError, TypeError, ValueError, OverflowError, MemoryError, RecursionError):
        pass
    raise ValueError(f"a value must be made of numbers and lists, as in '[(512, 3)] * 2', got {text!r}")
