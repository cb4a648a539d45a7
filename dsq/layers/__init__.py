"""The quantised selves of layers other than nn.Linear, a file a layer; the last two files need transformers.

multihead.py            nn.MultiheadAttention
conv1d.py               GPT-2's linear layer
attention_interface.py  the attention function of models of transformers
"""
