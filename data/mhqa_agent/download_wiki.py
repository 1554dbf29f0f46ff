"""Fetch what the MHQA agent's wiki search needs: the Wikipedia of 2018 and a published E5 index of it.

    python data/mhqa_agent/download_wiki.py --output-dir indexes/wiki18 [--index flat|hnsw|none] [--gunzip] [--dry-run]

It is `afm serve wiki download`; docs/wiki.md says what comes then.
"""

import sys

from afm.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["serve", "wiki", "download"]
    main()
