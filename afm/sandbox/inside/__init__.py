"""What runs inside the zygote's jail, under the sandbox's own Python (3.9 or newer).

The host hands these files' text to the jail. They import nothing of the project but each other.
"""
