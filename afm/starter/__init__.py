"""What ``afm init`` copies into a new folder: a task of the user's own, small enough for two cores."""
