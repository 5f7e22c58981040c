"""Text from trained models: generation, evaluation, prompts."""
