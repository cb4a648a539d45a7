"""Answers to the questions of users: plan.py; how long a step takes: step.py."""
