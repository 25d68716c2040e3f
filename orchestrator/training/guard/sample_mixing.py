"""Finds operations in the graph of a loss that make one sample's result depend on others of its
micro-batch.

Such a training changes with the micro-batch size: batch norm takes its statistics over the samples,
and a contrastive loss takes the others as negatives. What the graph does not show is not found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

NODES_MAX = 20_000  # of a graph: a walk takes 0.1 s at most
SAMPLES_MAX = 65_536  # of a micro-batch whose targets are read
BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "SyncBatchNorm")


def list_mixing_operations(loss: Any) -> tuple[str, ...]:
    """Return the operations that mix the samples of a micro-batch, in a few words each; () if the
    graph has none.

    `loss` is a tensor whose graph still has its saved tensors.
    """
    counts = Counter(
        kind for node in _list_graph_nodes(loss.grad_fn) if (kind := _find_mixing_kind(node))
    )
    rows = []
    if layers := counts["norm"]:
        rows.append(f"batch norm in {layers} layer{'s' * (layers > 1)}")
    if counts["negatives"]:
        rows.append("a loss whose negatives are the other samples")
    return tuple(rows)


def _list_graph_nodes(root: Any) -> Iterator[Any]:
    """Yield each node of a graph once, at most NODES_MAX."""
    left = [root]
    visited = set[Any]()
    while left and len(visited) < NODES_MAX:
        node = left.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            left += [parent for parent, _ in node.next_functions]


def _find_mixing_kind(node: Any) -> str | None:
    name = type(node).__name__
    if name.startswith(BATCH_NORMS):
        has_statistics = getattr(node, "_saved_training", True)
        samples = getattr(node, "_saved_input", None)
        # instance norm is a batch norm over one sample
        is_alone = samples is not None and samples.shape[0] == 1
        return "norm" if has_statistics and not is_alone else None
    if name.startswith("NllLossBackward") and _has_sample_classes(node):
        return "negatives"
    return None


def _has_sample_classes(node: Any) -> bool:
    """Return whether a loss's classes are the samples: the n-th target is the n-th column, or group
    of columns.
    """
    target = node._saved_target
    scores = node._saved_self
    if target.dim() != 1 or scores.dim() != 2 or not 2 <= len(target) <= SAMPLES_MAX:
        return False
    rows, columns = scores.shape
    if columns % rows:
        return False
    first, *others = target.tolist()
    steps = {later - earlier for earlier, later in zip([first, *others], others, strict=False)}
    return steps in ({1}, {columns // rows})
