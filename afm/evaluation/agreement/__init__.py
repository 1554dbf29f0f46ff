"""Whether judges agree: verdicts of a finished evaluation given again, by another judge or by the same one."""
