"""Questions with gold answers: their schema and readers, the generated world, files for SFT and RL."""

from afm.datasets.schema import Task, read_task_files, read_tasks, scan_tasks, task_of_row, write_tasks

__all__ = ["Task", "read_task_files", "read_tasks", "scan_tasks", "task_of_row", "write_tasks"]
