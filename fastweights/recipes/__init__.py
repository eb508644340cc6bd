"""Whole jobs, each one command: they join training, evaluation, generation and report."""
