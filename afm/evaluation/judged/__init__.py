"""Judges of a finished evaluation: they choose among its episodes without the gold answer, or judge its verdicts again."""
