"""The one mechanism under every policy: PyTorch's saved-tensor hooks, and rules around calls of PyTorch's functions.

From what runs first to what the backward reads:
    hooks.py            contexts entered around a model's forward, and hooks around one op
    rules/              a rule decides, for one call, in what form the op's saved tensors are kept (a function mode)
    forms.py, masks.py  the forms: as it is, dropped, narrow integers, one bit an element
    forward_stash.py    what a quantising policy does around its own code: one code for all views of a tensor
    storages.py         which memory a tensor lies in, and the cache of what was made of it
    memory_order.py     a tensor's distinct values in the order they lie in memory
    history.py          what a saved tensor's autograd history tells: a weight, a cast, a statistic
    window.py           hooks between the forward and its backward, for what the loss saves
    class_swap.py       modules given another class in place
    affine.py           a quantiser with a step and a minimum a group
    compiled_graphs/    what graphs of torch.compile save, which no mode sees and which has no history
    multi_head_forward.py  nn.MultiheadAttention's function in parts that a mode can see
"""
