"""The page reader: public web pages as text, summed up toward what an agent is looking for."""
