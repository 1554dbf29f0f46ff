"""Selection of questions for RL: those that a model does not already solve (AFM, arXiv 2508.13167)."""
