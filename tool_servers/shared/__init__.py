"""What the tool servers have in common: token, admission, request bodies, metrics, starting and stopping."""
