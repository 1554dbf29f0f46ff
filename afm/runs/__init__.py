"""The output folders of long jobs: atomic files, locks, claims, journals and manifests."""
