"""What decides whether a trajectory is good enough to learn from: stages with a reason per dropped row."""
