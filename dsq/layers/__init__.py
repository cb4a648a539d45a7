"""The quantised selves of layers other than nn.Linear, a file a layer; the last two need transformers.

multihead.py            nn.MultiheadAttention
own_attention.py        modules that call F.scaled_dot_product_attention
patches.py              nn.Conv2d that cuts an image into patches
unquantised.py          which modules stay as they are, and why
mixed.py                classes made when a model is converted
experts.py              transformers' experts, in parameters of three dimensions
conv1d.py               GPT-2's linear layer
attention_interface.py  the attention function of models of transformers
"""
