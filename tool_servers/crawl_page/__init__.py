"""The page reader: public web pages as text, summarised for what an agent looks for."""
