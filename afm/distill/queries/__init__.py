"""Selection of questions for reinforcement: those that a model does not already solve (AFM, arXiv 2508.13167)."""
