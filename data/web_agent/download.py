"""Fetch the data of the web agent from the Hugging Face Hub, or the mirror that HF_ENDPOINT names.

    python data/web_agent/download.py [--output-dir data/web_agent/raw] [--only SET] [--all] [--pin] [--dry-run]

It is `afm data download configs/data/web_agent.yaml`; docs/data.md says what comes then. AFM's benchmark
files and prompts come from GitHub, or the mirror that GITHUB_RAW_ENDPOINT names.
"""

import sys
from pathlib import Path

from afm.cli.main import main

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sets = here.parents[1] / "configs/data/web_agent.yaml"
    sys.argv[1:1] = ["data", "download", str(sets), "--output-dir", str(here / "raw")]
    main()
