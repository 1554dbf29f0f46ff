"""Asking HTTP services: connections, pace, retries, keys, budgets, prices, and chat completions."""
