"""The wiki search server: passages of a local corpus by BM25, by embeddings, or by both."""
