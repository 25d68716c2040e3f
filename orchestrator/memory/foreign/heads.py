"""What norm, logits and loss of somebody else's training hold at their peak, in bytes."""

from __future__ import annotations

from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.losses import Loss
from orchestrator.memory.foreign.training import Training

# Copies and gradients of all logits that are there at once, and whether they are fp32 whatever the logits are; counted
# by torch 2.13's profiler on CPU, 2026-11, where nothing else is said.
LOGITS: dict[Loss, tuple[int, bool]] = {
    # fp32 logits, the copy without the last token, its log-softmax; on the way back the latter, its gradient, the next
    Loss.PLAIN: (3, True),
    # the same at the log-softmax, in a function whose caller has the logits as well (transformers/loss/loss_utils.py,
    # ForCausalLMLoss, of 4.46 to 4.48)
    Loss.UPCAST: (3, True),
    Loss.LABELS: (3, True),  # the same on the way back, of all tokens (since 4.49)
    Loss.LOW: (3, False),  # Qwen/Qwen-7B, modeling_qwen.py
    Loss.SUMMED: (2, False),  # logits and their gradient
    Loss.SHIFTED: (2, True),  # the plain one with a kernel that works in place; transformers 4.48 copies to shift
    # log-softmax, zeros with -1 at labels, their sum with its exponential, the product with what came back
    # (torch/distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward)
    Loss.SPREAD: (4, True),
    Loss.LISTED: (2, True),  # logits and log-softmax (litgpt/utils.py, chunked_cross_entropy, of Fabric's fp32 outputs)
    # nothing wide is stored (torchtitan/components/loss.py); returned beside the loss, logits get a gradient of zeros
    Loss.COMPILED: (2, False),
    Loss.CHUNKED: (1, False),  # torchtune/modules/loss/ce_chunked_output_loss.py
    Loss.IN_PLACE: (1, False),  # flash_attn/losses/cross_entropy.py, inplace_backward
    Loss.FUSED: (0, False),  # liger_kernel/ops/fused_linear_cross_entropy.py
}


def head_bytes(training: Training) -> int:
    """Norm, logits and loss at their peak, of one micro-batch.

    A head in 4 bits is dequantised to fp16, then cast; of a frozen one in fp32, what autocast makes of it stays for the
    way back.
    """
    shape, t, width, loss = training.shape, training.target_tokens, training.width, training.loss
    states = t * (training.stream + 4) * shape.hidden
    if not shape.causal:
        return states
    if training.adapters.quantises_head and training.adapters.base_bytes is not None:
        states += 4 * shape.table
    if training.adapters.ends_fp32 and training.low_precision:
        states += width * shape.table
    logits = t * shape.vocab // training.tp
    if training.framework.is_megatron:
        return states + _megatron_logit_bytes(training) * logits
    if loss is Loss.FUSED:  # a chunk is as wide as the hidden states
        chunk = max(1, t * shape.hidden // max(1, shape.vocab))
        return states + 4 * min(chunk, t) * shape.vocab
    # of one chunk logits and gradients, or what the plain loss has but the fp32 logits
    of_chunk = {Loss.LISTED: 8, Loss.CHUNKED: 8 + width}.get(loss, 0)
    of_all = sum(logit_blocks(training)) + held_bytes(training)
    return states + of_all + of_chunk * logits // training.loss_chunks


def _megatron_logit_bytes(training: Training) -> int:
    """Of one logit: as it is and in fp32, whose exponential takes its place and becomes the gradient.

    It stands beside from September 2022 to June 2024 (core/tensor_parallel/cross_entropy.py, commits 55817ec9 and
    a8abc4f7), and where it is compiled (core/fusions/fused_cross_entropy.py).
    """
    early = training.platform.is_old or training.framework is Framework.MEGATRON_DEEPSPEED
    beside = (early and not training.platform.before_torch_1_11) or training.loss is Loss.SHIFTED
    return training.width + (8 if beside else 4)


def logit_blocks(training: Training) -> list[int]:
    """Bytes of each copy or gradient of all logits that is there at the loss's peak, beside those that a loop holds."""
    if not training.shape.causal:
        return []
    count, is_wide = LOGITS[training.loss]
    logits = training.target_tokens * training.shape.vocab // training.tp
    beside = training.loss is Loss.UPCAST and training.low_precision and not training.holds_outputs
    low = [training.width * logits] * (beside + (training.shape.capped and count > 0))
    return count * [(4 if is_wide else training.width) * logits] + low


def held_bytes(training: Training) -> int:
    """Logits that the loop holds until the backward pass is over."""
    made = training.loss in (Loss.PLAIN, Loss.UPCAST, Loss.LABELS, Loss.LOW, Loss.COMPILED) and training.shape.causal
    if not training.holds_outputs or not made or training.framework.is_megatron:
        return 0
    width = 4 if training.loss is Loss.PLAIN else training.width
    return width * training.target_tokens * training.shape.vocab // training.tp
