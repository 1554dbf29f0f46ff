"""Fetch the data of the web agent from the Hugging Face Hub, or the mirror that HF_ENDPOINT names.

    python data/web_agent/download.py --out downloads/web_agent [--only SET] [--all] [--pin] [--dry-run]

It is `afm data download configs/data/web_agent.yaml`; docs/data.md says what comes then.
"""

import sys
from pathlib import Path

from afm.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = [
        "data",
        "download",
        str(Path(__file__).resolve().parents[2] / "configs/data/web_agent.yaml"),
    ]
    main()
