"""Transformers as stated shapes: what a configuration says, and what transformer.py builds operations from."""

from dataclasses import dataclass

from dsq.arguments import whole_number
from dsq.costmodel.names import refuse

MAX_SIZE = 2**24
MAX_LAYERS = 4096


@dataclass(frozen=True)
class MixtureOfExperts:
    """A mixture of experts in place of an MLP: gated MLPs, of which a router chooses some for each token."""

    count: int
    per_token: int  #: a token's experts, as many as run it
    width: int  #: of an expert's hidden layer


@dataclass(frozen=True)
class Patches:
    """A convolution that cuts pictures into patches: a product of (patches, channels * size * size)."""

    channels: int
    size: int  #: pixels of a patch's edge
    count: int  #: patches of a picture, which fix the length of the input


@dataclass(frozen=True)
class Stack:
    """A stack of alike layers."""

    name: str  #: "encoder" or "decoder"
    layers: int
    d: int  #: model width
    heads: int
    ffn: int  #: width of the MLP's hidden layer
    kv_heads: int = 0  #: key and value heads (grouped-query attention); 0: as many as ``heads``
    head_dim: int = 0  #: 0: d / heads
    experts: MixtureOfExperts | None = None
    gated: bool = False  #: the MLP has a gate (SwiGLU, GeGLU): two up projections
    transposed: bool = False  #: weights of linear layers are stored (in, out)
    fused_qkv: bool = False  #: one layer makes queries, keys and values
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    rms: bool = False  #: norms have a scale only
    casts_late: bool = False  #: norms multiply x before its cast; an MLP's last layer casts its x once more (T5)
    norms: int = 2  #: norms a layer has, without the one of cross-attention; 1: attention and MLP side by side
    post_norm: bool = False  #: norms come after the sublayers' sums, not before
    sandwich_norm: bool = False  #: norms come before a sublayer and before its sum (Gemma 2)
    qk_norm: bool = False  #: queries and keys are normed, head by head
    heads_copied: bool = False  #: products that no fused kernel makes read copies of their heads (torch.matmul)
    rotary: float = 0  #: part of each query and key that rotary positions turn
    #: distances for which self-attention's scores have a learned bias, and cross-attention's zeros (T5); 0: none
    position_bias: int = 0
    cross: bool = False  #: attends to the encoder
    final_norm: bool = False
    embedding_norm: bool = False
    tables: tuple[tuple[str, int], ...] = ()  #: embeddings looked up at the input: (name, rows)
    patches: Patches | None = None  #: the input is pictures
    activation: str = "activation"  #: its kind of pass (ledger.POINTWISE)
    causal: bool = False  #: a query sees no later key
    window: int = 0  #: keys that a query sees, itself one of them; 0: all
    full_every: int = 0  #: each so manieth layer has no window; 0: none
    caps: bool = False  #: scores and logits pass through a tanh (Gemma 2)
    dropout: bool = False  #: after the embeddings and each sublayer
    attention_dropout: bool = False
    upcasts: bool = True  #: eager attention computes softmax in fp32
    more_dropout: bool = False  #: where there is dropout, also inside an MLP and behind the final norm (T5)
    extra_parameters: int = 0  #: parameters that belong to no operation (a class token)

    def __post_init__(self) -> None:
        for field, most in (("d", MAX_SIZE), ("heads", MAX_SIZE), ("ffn", MAX_SIZE), ("layers", MAX_LAYERS)):
            whole_number(f"{self.name}.{field}", getattr(self, field), 1, most)
        heads = f"{self.name}.heads ({self.heads})"
        refuse(
            (
                not self.head_dim and self.d % self.heads,
                f"{self.name}.d ({self.d}) must be a multiple of {heads}",
            ),
            (
                self.heads % (self.kv_heads or self.heads),
                f"{heads} must be a multiple of {self.name}.kv_heads ({self.kv_heads})",
            ),
        )

    @property
    def keys(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d // self.heads

    @property
    def qkv_width(self) -> int:
        """Width of queries, keys and values together."""
        return (self.heads + 2 * self.keys) * self.head_width


@dataclass(frozen=True)
class Head:
    """The layers that turn the last hidden state into logits."""

    kind: str = "lm"  #: "lm": at every position; "classes": at the first of each sequence; "none": no logits, no loss
    outputs: int = 0
    bias: bool = False
    tied: bool = False  #: the projection is the embedding table
    dense: bool = False  #: a layer and an activation come before it (a pooler, or the transform of a masked LM)
    norm: bool = False  #: a norm comes after that layer
    loss: str = "loss"  #: its kind of pass (ledger.POINTWISE): "loss of fp32" has fp32 logits, whatever passes


@dataclass(frozen=True)
class Transformer:
    name: str
    head: Head
    encoder: Stack | None = None
    decoder: Stack | None = None
    sequences: int = 1
    source_length: int = 512
    target_length: int = 512
    fuses: bool = True  #: its attention runs in a fused kernel, where one takes it (F.scaled_dot_product_attention)
    source: str = ""
    positions: int = 0  #: tokens that it was made for; 0: not stated
    weight_format: str = ""  #: in which its file stores weights of few bits, as "4-bit (bitsandbytes)"

    def __post_init__(self) -> None:
        for field in ("sequences", "source_length", "target_length"):
            whole_number(field, getattr(self, field), 1, MAX_SIZE)

    @property
    def table_positions(self) -> int:
        """Rows of a table of positions; 0: it has none."""
        stacks = [stack for stack in (self.encoder, self.decoder) if stack]
        return self.positions if any("positions" in dict(stack.tables) for stack in stacks) else 0
