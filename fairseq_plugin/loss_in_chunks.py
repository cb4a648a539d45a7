"""fairseq's cross-entropies in chunks of sentences, under --dsq-stash all, without the logits of a whole batch.

The tensors between the output layer and the loss (logits, their log-softmax, the gradients of both) take more memory
than a packed stash: 4 tensors of 4,096 tokens by 32,000 words are 2.1 GB. Here the model returns its features. The
forward computes each chunk's logits, its loss by the criterion's own ``compute_loss``, and its gradients at once, as
Liger-Kernel does; the backward multiplies these by the loss's gradient. Floating-point sums are taken in another order.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models import FairseqLanguageModel
from torch import Tensor, nn

#: approximate size of a chunk, which has whole sentences
TOKENS = 1024
FEATURES_ONLY = "features_only"  #: fairseq's argument of a transformer's forward that omits the logits


def in_chunks(criterion: Any, model: nn.Module) -> Any:
    """Return ``criterion``, which computes its loss in chunks if it and ``model`` allow that.

    The criterion must be one of fairseq's two cross-entropies, without accuracy; the model's transformer must be able
    to return its features.
    """
    chunked, decoder = _IN_CHUNKS.get(type(criterion)), getattr(model, "decoder", None)
    if chunked is None or getattr(criterion, "report_accuracy", False) or not hasattr(decoder, "output_projection"):
        return criterion
    called: Any = decoder if isinstance(model, FairseqLanguageModel) else model  # a language model passes arguments on
    if (
        FEATURES_ONLY in inspect.signature(called.forward).parameters
        and getattr(decoder, "adaptive_softmax", None) is None
    ):
        criterion.__class__ = chunked
    return criterion


class _InChunks:
    """A mixin before a criterion of fairseq's."""

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> Any:
        if not reduce or getattr(model, "find_unused_parameters", False):  # DDP sees no output layer in the forward
            return super().forward(model, sample, reduce)  # type: ignore[misc]
        features_only = {**sample["net_input"], FEATURES_ONLY: True}
        return super().forward(model, {**sample, "net_input": features_only}, reduce)  # type: ignore[misc]

    def compute_loss(self, model: Any, net_output: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, Tensor]:
        if not sample["net_input"].get(FEATURES_ONLY):
            return super().compute_loss(model, net_output, sample, reduce=reduce)  # type: ignore[misc,no-any-return]
        features_BTD, layer_results = net_output
        layer_results.clear()  # nothing reads them
        compute_loss, target_BT = super().compute_loss, model.get_targets(sample, net_output)  # type: ignore[misc]

        def losses(features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            logits = model.decoder.output_layer(features)
            loss, nll_loss = compute_loss(model, (logits, layer_results), {**sample, "target": target})
            return loss, nll_loss.detach()

        sentences = max(1, TOKENS // features_BTD.shape[1])
        parameters = (p for p in model.decoder.output_projection.parameters() if p.requires_grad)
        return sums(losses, sentences, features_BTD, target_BT, *parameters)


_IN_CHUNKS: dict[type, type] = {
    kind: type(kind.__name__, (_InChunks, kind), {})  # a checkpoint has the name, with DSQ and without
    for kind in (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion)
}

Losses = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def sums(losses: Losses, size: int, x: Tensor, target: Tensor, *parameters: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Return the sums over chunks of ``size`` rows of the two results of ``losses(x, target)``.

    The first is a loss, which has the gradients of ``x`` and ``parameters``. The second is a number for the log, and
    has no gradient. The backward may run once.
    """
    return _Sums.apply(losses, size, x, target, torch.is_grad_enabled(), *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, losses: Losses, size: int, x: Tensor, target: Tensor, training: bool, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, logged = torch.zeros(2, device=x.device)
        dx, d_parameters = [], [torch.zeros_like(p, dtype=torch.float32) for p in parameters if training]
        for rows, row_targets in zip(x.split(size), target.split(size), strict=True):
            with torch.set_grad_enabled(training):
                chunk = rows.detach().requires_grad_(training)
                loss, number = losses(chunk, row_targets)
            total, logged = total + loss.detach(), logged + number
            if training:
                dx_chunk, *dp_chunk = torch.autograd.grad(loss, (chunk, *parameters))
                dx.append(dx_chunk)
                for sum_, term in zip(d_parameters, dp_chunk, strict=True):
                    sum_ += term
        ctx.save_for_backward(*([torch.cat(dx)] if training else []), *d_parameters)
        ctx.mark_non_differentiable(logged)
        return total, logged

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, d_logged: Tensor) -> tuple[Tensor | None, ...]:
        dx, *d_parameters = (gradient.mul_(d_total) for gradient in ctx.saved_tensors)
        return None, None, dx, None, None, *d_parameters
