"""Hardware profiles: a .toml file each, and what reads them."""
