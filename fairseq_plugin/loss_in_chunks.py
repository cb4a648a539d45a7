"""fairseq's cross-entropies in chunks of sentences, under --dsq-stash all: never the logits of a whole batch.

What fairseq keeps between the output layer and the loss (logits, their log-softmax, the gradients of both) takes more
memory than a packed stash: 4 tensors of 4,096 tokens by 32,000 words are 2.1 GB. Here the model gives its features, and
each chunk's logits are made, judged by the criterion's own ``compute_loss``, and turned into gradients at once, in the
forward (as Liger-Kernel does); the backward multiplies those by the loss's. Sums of floats come in another order.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models import FairseqLanguageModel
from torch import Tensor, nn

#: of a chunk, about: it has whole sentences
TOKENS = 1024
FEATURES_ONLY = "features_only"  #: fairseq's argument of a transformer's forward: no logits


def in_chunks(criterion: Any, model: nn.Module) -> Any:
    """Return ``criterion``, which makes its loss in chunks where it is one of fairseq's two cross-entropies, nothing
    but the loss is asked of it, and ``model`` is one whose transformer gives its features."""
    made, decoder = _IN_CHUNKS.get(type(criterion)), getattr(model, "decoder", None)
    if made is None or getattr(criterion, "report_accuracy", False) or not hasattr(decoder, "output_projection"):
        return criterion
    asked: Any = decoder if isinstance(model, FairseqLanguageModel) else model  # the first passes on what it is given
    if (
        FEATURES_ONLY in inspect.signature(asked.forward).parameters
        and getattr(decoder, "adaptive_softmax", None) is None
    ):
        criterion.__class__ = made
    return criterion


class _InChunks:
    """Stands before a criterion of fairseq's."""

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> Any:
        if not reduce or getattr(model, "find_unused_parameters", False):  # DDP sees no output layer in the forward
            return super().forward(model, sample, reduce)  # type: ignore[misc]
        features_only = {**sample["net_input"], FEATURES_ONLY: True}
        return super().forward(model, {**sample, "net_input": features_only}, reduce)  # type: ignore[misc]

    def compute_loss(self, model: Any, net_output: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, Tensor]:
        if not sample["net_input"].get(FEATURES_ONLY):
            return super().compute_loss(model, net_output, sample, reduce=reduce)  # type: ignore[misc,no-any-return]
        features_BTD, others = net_output
        others.clear()  # the results of all layers, which nothing reads
        whole, target_BT = super().compute_loss, model.get_targets(sample, net_output)  # type: ignore[misc]

        def losses(features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            found = whole(model, (model.decoder.output_layer(features), others), {**sample, "target": target})
            return found[0], found[1].detach()

        sentences = max(1, TOKENS // features_BTD.shape[1])
        parameters = (it for it in model.decoder.output_projection.parameters() if it.requires_grad)
        return sums(losses, sentences, features_BTD, target_BT, *parameters)


_IN_CHUNKS: dict[type, type] = {
    kind: type(f"{kind.__name__}InChunks", (_InChunks, kind), {})
    for kind in (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion)
}

Losses = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def sums(losses: Losses, size: int, x: Tensor, target: Tensor, *parameters: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Return the sums, over chunks of ``size`` rows, of what ``losses(x, target)`` gives: a loss, which has the
    gradients of ``x`` and ``parameters``, and a number for the log, which has none. The backward may run once."""
    return _Sums.apply(losses, size, x, target, torch.is_grad_enabled(), *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, losses: Losses, size: int, x: Tensor, target: Tensor, training: bool, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, logged = torch.zeros(2, device=x.device)
        dx, others = [], [torch.zeros_like(it, dtype=torch.float32) for it in parameters if training]
        for rows, wanted in zip(x.split(size), target.split(size), strict=True):
            with torch.set_grad_enabled(training):
                chunk = rows.detach().requires_grad_(training)
                loss, number = losses(chunk, wanted)
            total, logged = total + loss.detach(), logged + number
            if training:
                found, *more = torch.autograd.grad(loss, (chunk, *parameters))
                dx.append(found)
                for into, it in zip(others, more, strict=True):
                    into += it
        ctx.save_for_backward(*([torch.cat(dx)] if training else []), *others)
        ctx.mark_non_differentiable(logged)
        return total, logged

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, d_logged: Tensor) -> tuple[Tensor | None, ...]:
        dx, *others = (it.mul_(d_total) for it in ctx.saved_tensors)
        return None, None, dx, None, None, *others
