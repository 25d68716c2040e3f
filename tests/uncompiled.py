"""Scripts that train without torch's compiler: an optimizer imports it though nothing is compiled.

That is a second of processor time of each process, more than the import of torch. DDP asks the compiler more than this.
"""

from __future__ import annotations

WITHOUT_COMPILER = """
import sys, types
import torch
torch._dynamo = sys.modules["torch._dynamo"] = types.SimpleNamespace(
    graph_break=lambda: None,
    disable=lambda function, recursive=True, **_: function,
    trace_rules=types.SimpleNamespace(clear_lru_cache=lambda: None),
)
"""
