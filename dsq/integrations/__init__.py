"""Integrations with trainers, one file each; users import that of their trainer."""
