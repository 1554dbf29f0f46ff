"""A sentence-transformers model that is only the token table of another one: its vectors cost next to nothing.

    .venv/bin/python benchmarks/static_model.py MINILM_FOLDER OUT
    .venv/bin/python benchmarks/bench_wiki.py --model OUT

Encoding a million passages on a CPU takes a real model hours. With this one the benchmark measures what is left: the index, the
search and the server. Its vectors know words and not their order, so read speed and memory from it, not quality.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def save_static(source: str, out: Path) -> int:
    """Save the token embeddings of ``source`` as a model that takes their mean; returns its dimensions."""
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
