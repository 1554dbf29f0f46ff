"""A model behind the part of the OpenAI API that evaluations use, in this process, on a CPU or one GPU."""
