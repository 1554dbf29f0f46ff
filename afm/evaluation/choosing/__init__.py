"""Test-time scaling by a judge: it chooses among several episodes of a question, without the gold answer."""
