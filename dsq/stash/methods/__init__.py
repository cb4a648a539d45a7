"""The stash policies, a file each; none imports another. Importing this package registers them."""

from dsq.stash.methods import bfp, checkpoint, gact, mesa, selective, wtacrs  # noqa: F401
