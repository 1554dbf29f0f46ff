"""What all tool servers share: token, admission, request bodies, metrics, start and stop."""
