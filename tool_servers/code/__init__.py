"""The code server: a sandbox pool for programs from other machines."""
