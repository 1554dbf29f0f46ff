"""What ``afm init`` copies into a new folder: a task of the user's own, sized for two cores."""
