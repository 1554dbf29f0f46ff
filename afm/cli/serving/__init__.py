"""``afm serve model``: OpenAI-compatible servers of one model, several if wanted, for evaluations."""
