"""Which questions are worth reinforcing on: those that a model does not answer anyway (AFM, arXiv 2508.13167)."""
