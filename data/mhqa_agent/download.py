"""Fetch the data of the multi-hop QA agent from the Hugging Face Hub, or the mirror that HF_ENDPOINT names. Its search needs a corpus as well: download_wiki.py.

    python data/mhqa_agent/download.py --out downloads/mhqa_agent [--only SET] [--all] [--pin] [--dry-run]

It is `afm data download configs/data/mhqa_agent.yaml`; docs/data.md says what comes then.
"""

import sys
from pathlib import Path

from afm.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = [
        "data",
        "download",
        str(Path(__file__).resolve().parents[2] / "configs/data/mhqa_agent.yaml"),
    ]
    main()
