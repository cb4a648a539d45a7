"""The packed stash of compiled graphs: ``dsq.compile``, a partitioner of torch.compile, and the codes it saves."""
