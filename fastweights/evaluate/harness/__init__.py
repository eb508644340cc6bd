"""lm-evaluation-harness as the engine for language tasks: its tasks, prompts and metrics; our adapter, data folders and intervals."""
