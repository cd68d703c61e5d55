"""One page of HTML for a run, or for a folder of comparisons."""
