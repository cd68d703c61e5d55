"""`airmoe doctor`: checks this machine, or a cluster file and its machines, and says what to do about each failure."""
