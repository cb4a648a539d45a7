"""Where an experiment's runs run, and what is on disk."""
