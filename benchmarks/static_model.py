"""Make a sentence-transformers model from the token embeddings of another one; its vectors cost almost nothing.

    .venv/bin/python benchmarks/static_model.py MINILM_FOLDER OUT
    .venv/bin/python benchmarks/bench_wiki.py --model OUT

A real model needs hours to encode a million passages on a CPU. With this model, the benchmark measures the rest: the index,
the search and the server. Its vectors ignore the order of words, so they show speed and memory, but not quality.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def save_static(source: str, out: Path) -> int:
    """Save the token embeddings of ``source`` as a model that averages them; return its dimensions."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import StaticEmbedding
    from transformers import AutoModel, AutoTokenizer

    table = AutoModel.from_pretrained(source).get_input_embeddings().weight.detach()
    tokenizer = AutoTokenizer.from_pretrained(source).backend_tokenizer
    static = StaticEmbedding(tokenizer, embedding_weights=table.numpy())
    SentenceTransformer(modules=[static]).save(str(out))
    return int(table.shape[1])


def main() -> None:
    """Make the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="folder or name of a Hugging Face encoder")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    print(f"{save_static(arguments.source, arguments.out)} dimensions in {arguments.out}")


if __name__ == "__main__":
    main()
