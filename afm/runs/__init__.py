"""Folders that long jobs fill: whole files, locks, claims, journals and manifests."""
