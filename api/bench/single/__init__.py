"""What one process does without Ray: the model against a plain reading of its equations."""
