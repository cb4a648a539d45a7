"""What the C allocator holds, counted from outside of PyTorch and of dsq: nothing that a process keeps escapes it.

counting_malloc.c  malloc, free and their relatives with a count
counted.py         a process started under it, and the count read from inside
held.py            bytes between forward and backward, and at the peak, of steps of a training loop
"""
