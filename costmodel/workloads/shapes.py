"""Transformers as stated shapes: what a configuration says, and what transformer.py builds operations from."""

from dataclasses import dataclass

from dsq.arguments import whole_number

MAX_SIZE = 2**24
MAX_LAYERS = 4096


@dataclass(frozen=True)
class MixtureOfExperts:
    """A mixture of experts in place of an MLP: gated MLPs, of which a router chooses some for each token."""

    count: int
    chosen: int  #: a token's experts, as many as run it
    width: int  #: of an expert's hidden layer
    shared: int = 0  #: width of the expert that every token goes through as well; 0: none
    bias: bool = False
    router_bias: bool = False
    dense_layers: frozenset[int] = frozenset()  #: layers that have a plain MLP instead
    converted: bool = True  #: by dsq.convert


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries, and keys with values, go through a narrow
    layer; a part of each key carries the position, and all heads share it."""

    query_rank: int  #: 0: queries are projected at once
    key_rank: int
    plain: int  #: width of a head's query and key without position
    rotary: int  #: and of the part with it
    value: int


@dataclass(frozen=True)
class Convolution:
    """A convolution over the input, as a matrix product of its patches: (positions, channels * kernel)."""

    name: str
    channels: int
    outputs: int
    kernel: int  #: of all its axes together: 16 * 16
    positions: int  #: it puts out, for one sequence
    stride: int  #: of all its axes together
    bias: bool = True
    activation: bool = False


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
    latent: Latent | None = None
    experts: MixtureOfExperts | None = None
    gated: bool = False  #: the MLP has a gate (SwiGLU, GeGLU): two up projections
    transposed: bool = False  #: weights of linear layers are stored (in, out)
    fused_qkv: bool = False  #: one layer makes queries, keys and values
    qkv_bias: bool = True
    key_bias: bool = True  #: keys have a bias where queries and values do
    out_bias: bool = True
    mlp_bias: bool = True
    rms: bool = False  #: norms have a scale only
    casts_late: bool = False  #: norms multiply x before its cast; an MLP's last layer casts its x once more (T5)
    norm_bias: bool = True  #: layer norms have a shift
    norms: int = 2  #: norms a layer has, without the one of cross-attention
    #: norms come after the sublayers' sums, not before; of four, each sublayer has one on both sides
    post_norm: bool = False
    first_norms: int = -1  #: norms of the first layer; -1: as many as of the others
    qk_norm: str = ""  #: queries and keys are normed: "head" by head, "all" heads together
    heads_copied: bool = False  #: products that no fused kernel makes read copies of their heads (torch.matmul)
    rotary: float = 0  #: part of each query and key that rotary positions turn
    context_copied: bool = False  #: heads lie apart in memory, so that the output projection reads a copy
    #: distances for which self-attention's scores have a learned bias, and cross-attention's zeros (T5); 0: none
    position_bias: int = 0
    cross: bool = False  #: attends to the encoder
    final_norm: bool = False
    embedding_norm: bool = False
    embedding_width: int = 0  #: of the tables, where a projection widens them to d; 0: d
    tables: tuple[tuple[str, int, int], ...] = ()  #: embeddings looked up at the input: (name, rows, width)
    frozen: tuple[str, ...] = ()  #: tables that are not trained
    convolutions: tuple[Convolution, ...] = ()  #: the input goes through them; they fix its length
    activation: str = "activation"  #: "relu" keeps its output for the backward, others their input
    causal: bool = False  #: a query sees no later key
    #: keys that a query sees to each side that it may see, itself one of them; 0: all. One a layer, again where
    #: there are more layers
    windows: tuple[int, ...] = ()
    dropout: bool = False  #: after the embeddings and each sublayer
    attention_dropout: bool = False
    converted: bool = True  #: its linear layers are what dsq.convert converts
    shared_layers: int = 0  #: layers that have parameters of their own, the rest share them; 0: all
    extra_parameters: int = 0  #: parameters that belong to no operation (a class token)
    layer_parameters: int = 0  #: and such of each layer (attention's sinks)

    def __post_init__(self) -> None:
        for field in ("d", "heads", "ffn"):
            whole_number(f"{self.name}.{field}", getattr(self, field), 1, MAX_SIZE)
        whole_number(f"{self.name}.layers", self.layers, 1, MAX_LAYERS)
        heads = f"{self.name}.heads ({self.heads})"
        if not self.head_dim and self.d % self.heads:
            raise ValueError(f"{self.name}.d ({self.d}) must be a multiple of {heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{heads} must be a multiple of {self.name}.kv_heads ({self.kv_heads})")


@dataclass(frozen=True)
class Head:
    """What turns the last hidden state into logits.

    kind "lm": a projection onto the vocabulary at every position; "classes": one at the first position of each
    sequence; "none": no logits, no loss.
    """

    kind: str = "lm"
    outputs: int = 0
    bias: bool = False
    tied: bool = False  #: the projection is the embedding table
    dense: bool = False  #: a layer and an activation come before it (a pooler, or the transform of a masked LM)
    dense_bias: bool = True
    width: int = 0  #: that the layer puts out; 0: d
    norm: bool = False  #: and a norm after that
    norm_bias: bool = True
    upcasts: bool = False  #: logits become fp32 before the loss, whatever the model's type


@dataclass(frozen=True)
class Transformer:
    name: str
    head: Head
    encoder: Stack | None = None
    decoder: Stack | None = None
    sequences: int = 1
    source_length: int = 512
    target_length: int = 512
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("sequences", "source_length", "target_length"):
            whole_number(field, getattr(self, field), 1, MAX_SIZE)
