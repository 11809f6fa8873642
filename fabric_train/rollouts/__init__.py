"""Sample completions of prompts, reward them, and store them as the rows of a training step."""
